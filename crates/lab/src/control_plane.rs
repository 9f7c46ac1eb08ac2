//! Creates the command lines and files of a cluster's control plane: etcd, API server, controller-manager, scheduler.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use crate::pki::{Authority, Pair, service_account_key};
use crate::plan::comma_separated;
use crate::{ClusterPlan, Error, Result, Tools};

/// The address of etcd inside the underlay's network namespace. One etcd serves all clusters, each with its own key prefix.
const ETCD: &str = "http://127.0.0.1:2379";

/// File to which an API server writes the requests that [`AUDIT_POLICY`] selects.
pub(crate) const AUDIT_LOG: &str = "audit.log";
/// An audit policy that logs only writes by the controller's ServiceAccount.
const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ['system:serviceaccount:clustermesh:clustermesh-controller']
  verbs: [create, update, patch, delete, deletecollection]
- level: None
";

fn certificate_error(error: rcgen::Error) -> Error {
    Error::Other(format!("create a certificate: {error}"))
}

fn write(path: PathBuf, text: &str) -> Result<()> {
    std::fs::write(&path, text).map_err(Error::io(format!("write {}", path.display())))
}

/// Creates a cluster's directory with its keys, audit policy and kubeconfigs: `admin.kubeconfig` (through the forwarded
/// port, for the host), `inside.kubeconfig` (the same user, for use on the underlay), and those of controller-manager,
/// scheduler, kube-proxy and flanneld.
pub(crate) fn write_files(directory: &Path, cluster: &ClusterPlan, port: u16) -> Result<()> {
    let pki = directory.join("pki");
    std::fs::create_dir_all(&pki).map_err(Error::io(format!("create {}", pki.display())))?;
    let (authority, pair) = Authority::new(&cluster.name).map_err(certificate_error)?;
    write(pki.join("ca.crt"), &pair.certificate)?;
    write(pki.join("ca.key"), &pair.key)?;
    let names = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
    ];
    let addresses = [
        Ipv4Addr::LOCALHOST.into(),
        cluster.api_address(),
        cluster.advertised_api(),
        cluster.api_service_ip(),
    ];
    let server = authority.server(&names, &addresses).map_err(certificate_error)?;
    write(pki.join("server.crt"), &server.certificate)?;
    write(pki.join("server.key"), &server.key)?;
    write(directory.join("audit.yaml"), AUDIT_POLICY)?;
    let (private, public) = service_account_key().map_err(certificate_error)?;
    write(pki.join("service-account.key"), &private)?;
    write(pki.join("service-account.pub"), &public)?;

    let inside = api_url(cluster.api_address());
    let from_nodes = server_for_nodes(cluster);
    let outside = format!("https://127.0.0.1:{port}");
    for (file, url, user, group) in [
        ("admin", &outside, "admin", Some("system:masters")),
        ("inside", &inside, "admin", Some("system:masters")),
        ("controller-manager", &inside, "system:kube-controller-manager", None),
        ("scheduler", &inside, "system:kube-scheduler", None),
        ("proxy", &from_nodes, "system:kube-proxy", None),
        ("flannel", &from_nodes, "flannel", None),
    ] {
        let text = authority
            .kubeconfig(&cluster.name, url, user, group)
            .map_err(certificate_error)?;
        write(directory.join(format!("{file}.kubeconfig")), &text)?;
    }
    Ok(())
}

/// A kubelet's kubeconfig, with the user and group that the Node authorizer and NodeRestriction expect.
pub(crate) fn node_kubeconfig(directory: &Path, cluster: &ClusterPlan, node: &str) -> Result<String> {
    let read = |name: &str| {
        let path = directory.join("pki").join(name);
        std::fs::read_to_string(&path).map_err(Error::io(format!("read {}", path.display())))
    };
    let pair = Pair {
        certificate: read("ca.crt")?,
        key: read("ca.key")?,
    };
    let authority = Authority::load(&cluster.name, &pair).map_err(certificate_error)?;
    let user = format!("system:node:{node}");
    authority
        .kubeconfig(&cluster.name, &server_for_nodes(cluster), &user, Some("system:nodes"))
        .map_err(certificate_error)
}

/// The URL at which nodes reach the API server. Nodes that are pods of another cluster use a ClusterIP of that cluster.
fn server_for_nodes(cluster: &ClusterPlan) -> String {
    api_url(cluster.api_for_nodes())
}

/// The URL of an API server at an address of either family.
pub(crate) fn api_url(address: IpAddr) -> String {
    format!("https://{}", SocketAddr::new(address, 6443))
}

fn service_ranges(cluster: &ClusterPlan) -> String {
    comma_separated(&cluster.service_cidrs())
}

/// Command lines of the control plane. Each process runs in the underlay's network namespace.
pub(crate) struct Commands<'a> {
    pub(crate) tools: &'a Tools,
    /// The run directory, which has a directory for each cluster.
    pub(crate) run: &'a Path,
}

impl Commands<'_> {
    fn argv(&self, program: &str, flags: Vec<String>) -> Result<Vec<String>> {
        Ok([self.tools.path(program)?.display().to_string()]
            .into_iter()
            .chain(flags)
            .collect())
    }

    pub(crate) fn etcd(&self) -> Result<Vec<String>> {
        let flags = vec![
            format!("--data-dir={}", self.run.join("etcd").display()),
            format!("--listen-client-urls={ETCD}"),
            format!("--advertise-client-urls={ETCD}"),
            "--listen-peer-urls=http://127.0.0.1:2380".into(),
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
        ];
        self.argv("etcd", flags)
    }

    pub(crate) fn api_server(&self, cluster: &ClusterPlan) -> Result<Vec<String>> {
        let pki = |file: &str| {
            self.run
                .join(&cluster.name)
                .join("pki")
                .join(file)
                .display()
                .to_string()
        };
        let directory = self.run.join(&cluster.name);
        let mut flags = vec![
            format!("--etcd-servers={ETCD}"),
            format!("--audit-policy-file={}", directory.join("audit.yaml").display()),
            format!("--audit-log-path={}", directory.join(AUDIT_LOG).display()),
            format!("--etcd-prefix=/{}", cluster.name),
            format!("--bind-address={}", cluster.api_address()),
            format!("--advertise-address={}", cluster.advertised_api()),
            "--secure-port=6443".into(),
            format!("--tls-cert-file={}", pki("server.crt")),
            format!("--tls-private-key-file={}", pki("server.key")),
            format!("--client-ca-file={}", pki("ca.crt")),
            format!("--service-account-key-file={}", pki("service-account.pub")),
            format!("--service-account-signing-key-file={}", pki("service-account.key")),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            "--authorization-mode=Node,RBAC".into(),
            "--enable-admission-plugins=NodeRestriction".into(),
            "--allow-privileged".into(),
            format!("--service-cluster-ip-range={}", service_ranges(cluster)),
            "--kubelet-preferred-address-types=InternalIP".into(),
            "--endpoint-reconciler-type=lease".into(),
        ];
        if !cluster.controllers {
            // Without a controller-manager nothing creates the default ServiceAccount, so the plugin would reject Pods.
            flags.push("--disable-admission-plugins=ServiceAccount".into());
        }
        self.argv("kube-apiserver", flags)
    }

    pub(crate) fn controller_manager(&self, cluster: &ClusterPlan) -> Result<Vec<String>> {
        let directory = self.run.join(&cluster.name);
        let file = |name: &str| directory.join(name).display().to_string();
        let mut flags = vec![
            format!("--kubeconfig={}", file("controller-manager.kubeconfig")),
            "--leader-elect=false".into(),
            "--secure-port=0".into(),
            // With the default rate limits, the nodes of a new cluster wait seconds for their pod ranges.
            "--kube-api-qps=500".into(),
            "--kube-api-burst=500".into(),
            "--use-service-account-credentials".into(),
            format!("--service-account-private-key-file={}", file("pki/service-account.key")),
            format!("--root-ca-file={}", file("pki/ca.crt")),
            "--allocate-node-cidrs".into(),
            format!("--cluster-cidr={}", comma_separated(&cluster.pod_cidrs())),
            format!("--service-cluster-ip-range={}", service_ranges(cluster)),
            "--configure-cloud-routes=false".into(),
            // The default is a directory under the host's /usr.
            format!("--flex-volume-plugin-dir={}", file("flex")),
        ];
        // The controller-manager refuses the flag of a family that the cluster does not have.
        flags.extend(cluster.pod_cidrs().iter().map(|range| match range {
            IpNet::V4(_) => "--node-cidr-mask-size-ipv4=24".into(),
            IpNet::V6(_) => "--node-cidr-mask-size-ipv6=64".into(),
        }));
        self.argv("kube-controller-manager", flags)
    }

    pub(crate) fn scheduler(&self, cluster: &ClusterPlan) -> Result<Vec<String>> {
        let kubeconfig = self.run.join(&cluster.name).join("scheduler.kubeconfig");
        let flags = vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            "--leader-elect=false".into(),
            "--secure-port=0".into(),
        ];
        self.argv("kube-scheduler", flags)
    }
}

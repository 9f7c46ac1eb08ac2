//! The command line of `clustermesh-controller`.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;
use clustermesh_core::{
    hub::{HubNamespace, HubNetwork, MemberNamespace},
    plan::InfrastructurePort,
};
use clustermesh_daemon::LogFormat;

/// Writes the Peers, PeerPolicies, SandboxAccesses and mirrored Services of each ClusterMesh into its members.
#[derive(Debug, Clone, Parser)]
#[command(name = "clustermesh-controller", version, about, max_term_width = 120)]
pub struct Args {
    /// Kubeconfig of the hub. Default: the ServiceAccount of the pod.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of that kubeconfig. Default: its current context.
    #[arg(long, requires = "kubeconfig")]
    pub context: Option<String>,

    /// Namespace whose ClusterMeshes may connect the hub itself (`local: true`). PROFILE is the least restrictive profile that
    /// their other entries may have: cluster-meshed (default), sandbox or standard. If CIDRs follow, allowedNetworks must be
    /// inside them. `sandbox` and `standard` require CIDRs: without CIDRs no mesh of the namespace is accepted. With these
    /// profiles, meshes may grant only the hub's Services of the same namespace, and Services with the annotation
    /// `kilo-clustermesh.io/allowed-from: NAMESPACE`. Repeatable; `*` = every namespace. Default: the controller's own namespace
    /// (POD_NAMESPACE, else the namespace of the kubeconfig's context, else `default`).
    #[arg(long = "hub-namespace", value_name = "NAMESPACE[=PROFILE[,CIDR...]]")]
    pub hub_namespaces: Vec<HubNamespace>,

    /// Namespace whose ClusterMeshes may connect members with each other, but not with the hub (no `local: true`).
    /// allowedNetworks must be inside the CIDRs. Repeatable; `*` = every namespace.
    #[arg(long = "member-namespace", value_name = "NAMESPACE,CIDR[,CIDR...]")]
    pub member_namespaces: Vec<MemberNamespace>,

    /// Pod and WireGuard networks of the hub. In a namespace with a list of CIDRs, only the entry with `local: true` may list
    /// hub networks, and it may list no others. Do not add the addresses of the hub's nodes: a Service of such a namespace could
    /// open them to a sandbox. Repeatable.
    #[arg(long = "hub-network", value_name = "CIDR[,CIDR...]", value_delimiter = ',')]
    pub hub_networks: Vec<HubNetwork>,

    /// A port of your infrastructure that is closed to every member on each address of every node, in addition to the default
    /// ports (API server, kubelet, etcd, scheduler, controller-manager, kube-proxy, wg-agent). Repeatable.
    #[arg(long = "infrastructure-port", value_name = "PORT[/PROTOCOL]")]
    pub infrastructure_ports: Vec<InfrastructurePort>,

    /// Label value that identifies this hub's objects in a member. Default: the UID of the hub's kube-system namespace.
    #[arg(long, value_name = "ID", value_parser = label_value)]
    pub hub_id: Option<String>,

    /// Memory limit of the process in bytes. Three eighths of it are for data of members. One member may use half of that; a
    /// member that needs more is Stale, and its status has the reason. The manifests set this to the pod's limit.
    #[arg(long, value_name = "BYTES", env = "MEMORY_LIMIT", default_value_t = 1 << 30, value_parser = clap::value_parser!(u64).range(64 << 20..))]
    pub memory_limit: u64,

    /// Address of /metrics, /healthz, /readyz and /debug/state.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:8081")]
    pub listen: SocketAddr,

    /// Serve /metrics to every client. Default: only to loopback clients, because the metrics name every mesh and cluster, and
    /// pods of every cluster-meshed member reach this port. Use this flag where a NetworkPolicy admits only your monitoring.
    #[arg(long)]
    pub open_metrics: bool,

    /// Format of log lines. RUST_LOG filters them.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// Accepts text that Kubernetes accepts as the value of a label, except empty text.
fn label_value(text: &str) -> Result<String, String> {
    let is_letter_or_digit = |b: u8| b.is_ascii_alphanumeric();
    let bytes = text.as_bytes();
    let fits = (1..=63).contains(&bytes.len())
        && bytes.first().copied().is_some_and(is_letter_or_digit)
        && bytes.last().copied().is_some_and(is_letter_or_digit)
        && bytes.iter().all(|b| is_letter_or_digit(*b) || b"-_.".contains(b));
    if fits {
        Ok(text.to_owned())
    } else {
        Err("must be the value of a label: at most 63 of a-z, A-Z, 0-9, '-', '_', '.', with a letter or digit at both ends".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clustermesh_core::mesh::Profile;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn infrastructure_port_flag_is_parsed_or_refused() {
        let parse = |values: &[&str]| {
            let flags = values.iter().flat_map(|value| ["--infrastructure-port", value]);
            Args::try_parse_from(["clustermesh-controller"].into_iter().chain(flags))
        };
        let ports = parse(&["8132", "53/UDP"]).unwrap().infrastructure_ports;
        assert_eq!(ports, ["8132/TCP", "53/UDP"].map(|text| text.parse().unwrap()));
        let why = parse(&["konnectivity"]).unwrap_err().to_string();
        assert!(
            why.contains("--infrastructure-port") && why.contains("8132/TCP"),
            "{why}"
        );
    }

    fn texts<N: ToString>(networks: impl Iterator<Item = N>) -> Vec<String> {
        networks.map(|network| network.to_string()).collect()
    }

    #[test]
    fn namespace_and_network_flags_are_parsed() {
        let args = Args::try_parse_from([
            "clustermesh-controller",
            "--hub-namespace=clustermesh",
            "--hub-namespace=team-x=sandbox,100.80.16.0/20,fd00:80::/48",
            "--member-namespace=team-y,10.20.0.0/16",
            "--hub-network=10.244.0.0/16,100.80.0.0/24",
        ])
        .unwrap();

        let hub_namespaces = args.hub_namespaces.iter();
        let hub_namespaces: Vec<_> = hub_namespaces
            .map(|flag| (&*flag.namespace, flag.profile_limit, texts(flag.networks.iter())))
            .collect();
        let listed = ["100.80.16.0/20", "fd00:80::/48"].map(str::to_owned);
        assert_eq!(
            hub_namespaces,
            [
                ("clustermesh", Profile::ClusterMeshed, vec![]),
                ("team-x", Profile::Sandbox, listed.to_vec()),
            ]
        );
        let member_namespaces = args.member_namespaces.iter();
        let member_namespaces: Vec<_> = member_namespaces
            .map(|flag| (&*flag.namespace, texts(flag.networks.iter())))
            .collect();
        assert_eq!(member_namespaces, [("team-y", vec!["10.20.0.0/16".to_owned()])]);
        let hub_networks = args.hub_networks.iter().map(|network| &network.0);
        assert_eq!(texts(hub_networks), ["10.244.0.0/16", "100.80.0.0/24"]);
    }

    #[test]
    fn invalid_hub_id_is_refused() {
        assert!(label_value("0b9ad1b6-51a3-4a44").is_ok());
        for text in ["", "-a", "a/b", &"x".repeat(64)] {
            assert!(label_value(text).is_err(), "{text:?}");
        }
    }
}

//! `cargo xtask demo --scenario sandbox`: a cluster for untrusted code enters another cluster through gateways. Through the tunnel it
//! reaches only the ports of the Service that are granted to it. Over the underlay it reaches more, until NetworkPolicies apply.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use anyhow::Context;
use clustermesh_lab::{
    ALWAYS_SCANNED_PORTS, Boundary, Cluster, Granted, Lab, LabPlan, MESH, Product, TrafficClient, Tunnel, WEB,
};

use super::{Demo, HUB, MEMBER, describe};

mod attack;

const SANDBOX: &str = "notebooks";
/// The grant: two of the three ports of one Service.
const GRANT: &str = "[{service: {cluster: mgmt, namespace: default, name: store}, \
                     ports: [{port: http}, {port: echo, protocol: UDP}], as: {namespace: default, name: hub-store}}]";

/// The hub, a trusted member, and a sandbox whose worker node is a pod of the hub.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (SANDBOX, 1)])
        .with_workers_in_pods(SANDBOX, HUB, &[1])
        .with_policies(HUB)
}

/// Sockets that answer a scan, or that should answer it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct OpenSockets {
    tcp: BTreeSet<SocketAddr>,
    udp: BTreeSet<SocketAddr>,
}

impl OpenSockets {
    fn granted(granted: &Granted) -> Self {
        Self {
            tcp: granted.tcp_sockets(),
            udp: granted.udp_sockets(),
        }
    }

    async fn scan(
        lab: &Lab,
        from: &TrafficClient,
        sockets: impl Iterator<Item = SocketAddr> + Clone,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            tcp: lab.scan(from, sockets.clone()).await?,
            udp: lab.scan_udp(from, sockets).await?,
        })
    }

    /// Like [`Self::scan`], but retries the `wanted` sockets that do not answer, because replies may be late on a loaded machine.
    async fn scan_with_retries(
        lab: &Lab,
        from: &TrafficClient,
        sockets: impl Iterator<Item = SocketAddr> + Clone,
        wanted: &Self,
    ) -> anyhow::Result<Self> {
        let mut found = Self::scan(lab, from, sockets).await?;
        for _ in 0..20 {
            let missing = wanted.without(&found);
            if missing == Self::default() {
                break;
            }
            found.tcp.extend(lab.scan(from, missing.tcp).await?);
            found.udp.extend(lab.scan_udp(from, missing.udp).await?);
        }
        Ok(found)
    }

    /// The sockets of `self` that are not in `other`.
    fn without(&self, other: &Self) -> Self {
        Self {
            tcp: self.tcp.difference(&other.tcp).copied().collect(),
            udp: self.udp.difference(&other.udp).copied().collect(),
        }
    }

    fn extend(&mut self, other: Self) {
        self.tcp.extend(other.tcp);
        self.udp.extend(other.udp);
    }

    fn describe_counts(&self) -> String {
        format!("{} answer TCP, {} answer UDP", self.tcp.len(), self.udp.len())
    }

    /// Prints a line for each address, with its description and open ports. The values of `descriptions` describe the address.
    fn print_by_address(&self, descriptions: &BTreeMap<SocketAddr, String>) {
        let mut lines: BTreeMap<IpAddr, (&str, Vec<String>)> = BTreeMap::new();
        for (sockets, protocol) in [(&self.tcp, ""), (&self.udp, "/UDP")] {
            for socket in sockets {
                let what = descriptions.get(socket).map_or("", String::as_str);
                let (_, ports) = lines.entry(socket.ip()).or_insert((what, Vec::new()));
                ports.push(format!("{}{protocol}", socket.port()));
            }
        }
        for (ip, (what, ports)) in lines {
            println!("    {ip:<15} {what}: {}", ports.join(" "));
        }
    }
}

impl std::fmt::Display for OpenSockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tcp = self.tcp.iter().map(ToString::to_string);
        let udp = self.udp.iter().map(|socket| format!("{socket}/UDP"));
        let all: Vec<String> = tcp.chain(udp).collect();
        f.write_str(if all.is_empty() { "nothing" } else { "" })?;
        f.write_str(&all.join(" "))
    }
}

/// The clusters and grants that all steps use.
struct Scene<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    member: Cluster<'a>,
    sandbox: Cluster<'a>,
    /// A pod of the sandbox, and root on its node.
    clients: Vec<TrafficClient>,
    /// The gateways, and the gateway ports of [`GRANT`].
    grant: Granted,
    /// All gateway ports of the grant at all gateways.
    granted_sockets: OpenSockets,
}

impl<'a> Demo<'a> {
    /// Runs the scenario.
    pub(super) async fn sandbox(&mut self) -> anyhow::Result<()> {
        let scene = self.set_up().await?;
        self.scan_underlay(&scene).await?;
        self.attack_through_tunnel(&scene).await?;
        self.check_trusted_member(&scene).await?;
        self.title("the objects: notebooks has revoked the controller's rights, and the mesh reports it");
        for (cluster, kinds) in [
            (&scene.hub, "clustermesh,peers,sandboxaccesses,sandboxgateways"),
            (&scene.sandbox, "peers,services"),
        ] {
            println!("$ kubectl --context {} get {kinds} -A", cluster.plan().name);
            println!("{}", cluster.kubectl(["get", kinds, "-A"]).await?.stdout);
        }
        Ok(())
    }

    /// Installs everything, creates the mesh, and checks that the granted Service answers at its ClusterIP in the sandbox.
    async fn set_up(&mut self) -> anyhow::Result<Scene<'a>> {
        let lab = self.lab;
        let [hub, member, sandbox] = [HUB, MEMBER, SANDBOX].map(|name| lab.cluster(name));
        self.title("install: crds/ and deploy/, as README.md describes");
        let clusters = [HUB, MEMBER, SANDBOX];
        let mut product = Product::install(lab, &clusters, Tunnel::Shipped, &|line| println!("  {line}")).await?;
        println!(
            "  mgmt: Services of every type: ClusterIP, headless, NodePort, LoadBalancer, and one on the host's network"
        );
        hub.run_web().await?;
        hub.run_store().await?;
        for cluster in [&member, &sandbox] {
            cluster.apply(&WEB.replace("replicas: 2", "replicas: 1")).await?;
            cluster.wait_for_rollout("default", "deployment/web").await?;
        }

        self.title("gateways in mgmt: the pods at which tunnels of sandboxes end (docs/operations/sandboxes.md)");
        for command in product.gateway_commands(&["default"]) {
            println!("$ {command}");
        }
        product.install_gateways(&["default"]).await?;

        self.title("one ClusterMesh: notebooks is a sandbox with one grant, of two of the Service's three ports");
        let mesh = product.mesh_with(&[SANDBOX], &[(SANDBOX, GRANT)]);
        println!("{mesh}");
        let applied = Instant::now();
        product.mesh_up(&mesh).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("the Service answers at its ClusterIP in notebooks");
        let webs = sandbox.web_pods().await?;
        let clients = webs
            .iter()
            .flat_map(|web| [TrafficClient::Pod(web.clone()), TrafficClient::Host(web.node.clone())]);
        let grant = product.granted(SANDBOX).await?;
        let scene = Scene {
            granted_sockets: OpenSockets::granted(&grant),
            clients: clients.collect(),
            lab,
            product,
            hub,
            member,
            sandbox,
            grant,
        };
        self.check_granted_service(&scene).await?;
        for from in &scene.clients {
            lab.wait_for_open_sockets(from, &scene.granted_sockets.tcp).await?;
        }
        println!(
            "  every gateway answers {:.1} s after kubectl apply",
            applied.elapsed().as_secs_f64()
        );
        let access = format!("{MESH}--{SANDBOX}");
        println!(
            "$ kubectl --context {HUB} get sandboxaccess {access} -o yaml   # all that the sandbox may reach in mgmt"
        );
        let words = ["get", "sandboxaccess", &access, "-o", "yaml"];
        println!("{}", scene.hub.kubectl(words).await?.stdout);
        println!("$ kubectl --context {HUB} get sandboxgateways -A -o wide   # through which pods");
        let words = ["get", "sandboxgateways", "-A", "-o", "wide"];
        println!("{}", scene.hub.kubectl(words).await?.stdout);
        Ok(scene)
    }

    async fn check_granted_service(&mut self, scene: &Scene<'_>) -> anyhow::Result<()> {
        let service = scene.sandbox.cluster_ip("default", "hub-store").await?;
        for from in &scene.clients {
            let answer = scene
                .lab
                .http_get_until_answered(from, &format!("http://{service}"))
                .await;
            let gateways = &scene.grant.gateways;
            let outcome = match &answer {
                Ok(seen) => match gateways.iter().find(|gateway| gateway.pod == seen.client_ip) {
                    Some(gateway) => describe(answer).map(|seen| format!("{seen} ({})", gateway.name)),
                    None => Err(format!("the server saw {}, which is no gateway", seen.client_ip)),
                },
                Err(_) => describe(answer),
            };
            self.check(&format!("{from} -> hub-store ({service})"), outcome);
        }
        Ok(())
    }

    /// Scans mgmt and tenant-a before the sandbox changes its routes. So packets to the gateways go through the tunnel, and
    /// packets to all other addresses over the underlay. First without NetworkPolicies, then with those in deploy/.
    async fn scan_underlay(&mut self, scene: &Scene<'_>) -> anyhow::Result<()> {
        self.title(
            "a scan of every address of mgmt and tenant-a, at every port that is open at any of them, with unchanged routes",
        );
        let Scene {
            lab,
            granted_sockets: granted,
            ..
        } = scene;
        let boundary = lab.boundary(SANDBOX)?;
        let all = boundary.sockets(&[&scene.member], &scene.grant).await?;
        println!(
            "  The worker of notebooks is a pod of mgmt, like a KubeVirt machine: outside the mesh, eth0 reaches what the underlay allows."
        );
        let mut open = OpenSockets::default();
        for from in &scene.clients {
            let found = OpenSockets::scan_with_retries(lab, from, all.keys().copied(), granted).await?;
            let outcome = match granted.without(&found) {
                missing if missing == OpenSockets::default() => {
                    Ok(format!("of {} sockets {}", all.len(), found.describe_counts()))
                }
                missing => Err(format!("granted, but no answer: {missing}")),
            };
            self.check(&format!("{from}, without any NetworkPolicy"), outcome);
            open.extend(found);
        }
        println!("  Granted by the mesh: {granted}. Open over the underlay only:");
        open.without(granted).print_by_address(&all);
        self.scan_with_policies(scene, &boundary, &all, &open).await
    }

    async fn scan_with_policies(
        &mut self,
        scene: &Scene<'_>,
        boundary: &Boundary<'_>,
        all: &BTreeMap<SocketAddr, String>,
        open: &OpenSockets,
    ) -> anyhow::Result<()> {
        self.title("kubectl apply -f deploy/cozystack/sandbox-networkpolicy.yaml, with its placeholders filled in");
        println!("{}", without_comments(&boundary.policy()?));
        let Scene {
            lab,
            granted_sockets: granted,
            ..
        } = scene;
        // The policies admit the sandbox's own API server and the resolver, which the mesh does not grant.
        let admitted = boundary.admitted().await?;
        // The first `enforce` applies the policies.
        let applied = Instant::now();
        for from in &scene.clients {
            boundary.enforce(from, &open.tcp, &granted.tcp).await?;
        }
        println!(
            "  in force {:.1} s after kubectl apply; still allowed: own API server and resolver, and WireGuard to the gateways",
            applied.elapsed().as_secs_f64()
        );
        let tcp: BTreeSet<SocketAddr> = granted.tcp.union(&admitted).copied().collect();
        for from in &scene.clients {
            let wanted = OpenSockets {
                tcp: tcp.clone(),
                udp: granted.udp.clone(),
            };
            let found = OpenSockets::scan_with_retries(lab, from, all.keys().copied(), &wanted).await?;
            // A resolver may ignore a datagram that is no DNS query.
            let is_udp_as_expected = found
                .udp
                .iter()
                .all(|socket| granted.udp.contains(socket) || admitted.contains(socket));
            let outcome = if found.tcp == tcp && is_udp_as_expected && found.udp.is_superset(&granted.udp) {
                Ok(format!("of {} sockets {}: {found}", all.len(), found.describe_counts()))
            } else {
                Err(format!("{found}; granted {granted}, admitted {admitted:?}"))
            };
            self.check(&format!("{from}, with the NetworkPolicies"), outcome);
        }
        self.check_granted_service(scene).await
    }

    async fn check_trusted_member(&mut self, scene: &Scene<'_>) -> anyhow::Result<()> {
        self.title("tenant-a is trusted: it reaches mgmt, but not the infrastructure ports");
        let web = scene.member.web_pods().await?.into_iter().next();
        let from = TrafficClient::Pod(web.context("tenant-a runs no web server")?);
        let stores = scene.hub.pods_of_app("store").await?;
        let store = stores.first().context("mgmt runs no pod of the Service store")?;
        let url = format!("http://{}:8080", store.ip);
        let answer = scene.lab.http_get_until_answered(&from, &url).await;
        self.check(&format!("{from} -> pod {}", store.name), describe(answer));
        let all = scene.hub.sockets().await?;
        let open = OpenSockets::scan(scene.lab, &from, all.keys().copied()).await?;
        // The API servers' addresses in kubeconfigs are reached over the underlay, not through the mesh.
        let apis = [&scene.hub, &scene.sandbox].map(|cluster| cluster.plan().api_address());
        println!(
            "  Sockets that answer ({} and {} are API servers, which answer over the underlay):",
            apis[0], apis[1]
        );
        open.print_by_address(&all);
        // `ALWAYS_SCANNED_PORTS` are the infrastructure ports and that of SSH.
        let wrong: Vec<_> = open
            .tcp
            .iter()
            .filter(|socket| ALWAYS_SCANNED_PORTS.contains(&socket.port()) && !apis.contains(&socket.ip()))
            .collect();
        let outcome = match wrong[..] {
            [] => Ok(format!(
                "of {} sockets {}, no infrastructure port through the mesh",
                all.len(),
                open.describe_counts()
            )),
            _ => Err(format!("{wrong:?}")),
        };
        self.check(
            "infrastructure ports (API server, kubelet, etcd, agent, ...) at every address",
            outcome,
        );
        Ok(())
    }
}

fn without_comments(yaml: &str) -> String {
    let lines = yaml.lines().filter(|line| !line.trim_start().starts_with('#'));
    lines.map(|line| format!("{line}\n")).collect()
}

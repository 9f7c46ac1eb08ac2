//! Tests two `cluster-meshed` tenants with equal pod and Service networks, `addressing: Masqueraded` and one hub, on whole clusters. The
//! tenants use pods and Services of the hub at the same time. The hub and the other tenant use the Services of a masqueraded tenant
//! through its gateways. Nothing else reaches its pods through the mesh.

use std::net::IpAddr;

use clustermesh_lab::{
    Answer, Cluster, GATEWAYS, Lab, LabPlan, MESH, NAMESPACE, Product, RunningPod, Tunnel, wait_until,
};
use serde_json::Value;

use crate::setup::{HUB, PATIENCE, anchors_of, assert_answers, expected_answer, host, json, pod, url, wireguard};

const TENANTS: [&str; 2] = ["tenant-a", "tenant-b"];
/// Mirrors the hub's web servers in a tenant under the name `hub-web`.
const EGRESS: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";
/// Mirrors the web servers of the first tenant, in the hub and in the second tenant, under the name `tenant-web`.
const EXPORT: &str =
    "{service: {cluster: tenant-a, namespace: default, name: web}, as: {namespace: default, name: tenant-web}}";

struct TestEnv<'a> {
    lab: &'a Lab,
    product: Product<'a>,
    hub: Cluster<'a>,
    hub_webs: Vec<RunningPod>,
    tenants: [Tenant<'a>; 2],
}

struct Tenant<'a> {
    cluster: Cluster<'a>,
    webs: Vec<RunningPod>,
}

#[tokio::test]
async fn masqueraded_tenants_with_equal_networks_share_a_hub() {
    let plan = LabPlan::clusters(&[(HUB, 2), (TENANTS[0], 2), (TENANTS[1], 2)]).with_ranges_of(TENANTS[1], TENANTS[0]);
    let lab = Lab::start(plan).await.unwrap();
    let mut product = Product::install(&lab, &[HUB, TENANTS[0], TENANTS[1]], Tunnel::Userspace, &|_| {})
        .await
        .unwrap();
    product.install_gateways_in(TENANTS[0], &["default"]).await.unwrap();
    let tenant = async |name| {
        let cluster = lab.cluster(name);
        let webs = cluster.run_web().await.unwrap();
        Tenant { cluster, webs }
    };
    let env = TestEnv {
        lab: &lab,
        hub: lab.cluster(HUB),
        hub_webs: lab.cluster(HUB).run_web().await.unwrap(),
        tenants: [tenant(TENANTS[0]).await, tenant(TENANTS[1]).await],
        product,
    };
    let (hub_egress, second_egress) = (format!("[{EXPORT}]"), EGRESS.replacen(']', &format!(", {EXPORT}]"), 1));
    let egress = [(HUB, &*hub_egress), (TENANTS[0], EGRESS), (TENANTS[1], &*second_egress)];
    let mesh = env.product.mesh_masqueraded(&TENANTS, &egress);
    env.product.mesh_up(&mesh).await.unwrap();

    for tenant in &env.tenants {
        env.pods_reach_hub_from_their_nodes_address(tenant).await;
        env.pods_of_tenant_reach_each_other(tenant).await;
    }
    env.hub_services_answer_in_both_tenants().await;
    env.services_of_a_tenant_answer_in_other_members().await;
    env.peers_contain_only_wireguard_addresses_of_tenants().await;
    env.nodes_ping_each_other().await;
    env.tenants_pods_are_reached_only_in_their_cluster().await;
    env.second_routed_tenant_stays_masqueraded(&egress).await;
}

impl TestEnv<'_> {
    /// The tenants are masqueraded, so a pod of the hub sees the WireGuard address of the client's node.
    async fn pods_reach_hub_from_their_nodes_address(&self, tenant: &Tenant<'_>) {
        for from in &tenant.webs {
            let node = wireguard(&tenant.cluster, &from.node).await;
            for to in &self.hub_webs {
                for client in [pod(from), host(&from.node)] {
                    let answer = self.lab.http_get_until_answered(&client, &url(to.ip, 8080)).await;
                    assert_eq!(answer.unwrap(), expected_answer(to, node), "{client}");
                }
            }
        }
    }

    /// The mirrored Service, and the hub's ClusterIP through the anchor.
    async fn hub_services_answer_in_both_tenants(&self) {
        let cluster_ip = self.hub.cluster_ip("default", "web").await.unwrap();
        for tenant in &self.tenants {
            let mirrored = tenant.cluster.cluster_ip("default", "hub-web").await.unwrap();
            let service_network = self.hub.plan().service_cidr.to_string();
            let [anchor] = &anchors_of(&service_network, &tenant.cluster).await[..] else {
                panic!("{service_network} has not exactly one anchor")
            };
            for from in &tenant.webs {
                let node = wireguard(&tenant.cluster, &from.node).await;
                assert_answers(self.lab, &pod(from), &url(mirrored, 80), &self.answers(|_| node)).await;
                let behind_anchor = self.answers(|to| self.source_behind(anchor, to));
                assert_answers(self.lab, &pod(from), &url(cluster_ip, 80), &behind_anchor).await;
            }
        }
    }

    /// The gateways of the tenant are the endpoints of its mirrored Service. The tenant's pods see the gateways' addresses
    /// as clients.
    async fn services_of_a_tenant_answer_in_other_members(&self) {
        let [exporter, other] = &self.tenants;
        let gateways = json(&exporter.cluster, &["get", "pods", "-n", GATEWAYS]).await;
        let gateways = gateways["items"].as_array().unwrap().iter();
        let gateways: Vec<IpAddr> = gateways
            .map(|gateway| gateway["status"]["podIP"].as_str().unwrap().parse().unwrap())
            .collect();
        for (importer, clients) in [(&self.hub, &self.hub_webs), (&other.cluster, &other.webs)] {
            let mirrored = wait_until("the mirrored Service", PATIENCE, async || {
                let mirrored = importer.cluster_ip("default", "tenant-web").await;
                mirrored.map_err(|error| error.to_string())
            })
            .await
            .unwrap();
            for from in clients {
                for client in [pod(from), host(&from.node)] {
                    let mut missing: Vec<&str> = exporter.webs.iter().map(|web| &*web.name).collect();
                    wait_until(format!("every answer to {client}"), PATIENCE, async || {
                        let answer = self.lab.http_get_until_answered(&client, &url(mirrored, 80)).await;
                        let answer = answer.map_err(|error| error.to_string())?;
                        assert!(gateways.contains(&answer.client_ip), "{answer:?}");
                        missing.retain(|name| *name != answer.pod);
                        if missing.is_empty() {
                            Ok(())
                        } else {
                            Err(format!("{missing:?}"))
                        }
                    })
                    .await
                    .unwrap();
                }
            }
        }
    }

    fn answers(&self, client_ip: impl Fn(&RunningPod) -> IpAddr) -> Vec<Answer> {
        self.hub_webs
            .iter()
            .map(|to| expected_answer(to, client_ip(to)))
            .collect()
    }

    /// The address from which an anchor's packets reach a pod. For a pod on the anchor it is the address of the pods' bridge, for
    /// other pods the anchor's InternalIP.
    fn source_behind(&self, anchor: &str, to: &RunningPod) -> IpAddr {
        match to.ip {
            IpAddr::V4(ip) if to.node == anchor => {
                let [a, b, c, _] = ip.octets();
                IpAddr::from([a, b, c, 1])
            }
            _ => self.lab.node(anchor).address(),
        }
    }

    async fn peers_contain_only_wireguard_addresses_of_tenants(&self) {
        let peers = json(&self.hub, &["get", "peers"]).await;
        let peers = peers["items"].as_array().unwrap();
        let allowed_ips = |peer: &Value| peer["spec"]["allowedIPs"].as_array().unwrap().clone();
        let is_gateway = |peer: &&Value| peer["metadata"]["annotations"]["kilo-clustermesh.io/gateway"] == "true";
        let (of_gateways, of_nodes): (Vec<&Value>, Vec<&Value>) = peers.iter().partition(is_gateway);
        assert_eq!(of_gateways.len(), 2);
        let mut found: Vec<Value> = of_nodes.into_iter().flat_map(allowed_ips).collect();
        let mut wanted = vec![];
        for tenant in &self.tenants {
            for web in &tenant.webs {
                wanted.push(format!("{}/32", wireguard(&tenant.cluster, &web.node).await).into());
            }
        }
        found.sort_by_key(Value::to_string);
        wanted.sort_by_key(Value::to_string);
        assert_eq!(found, wanted);
    }

    /// Nodes of the hub and of both tenants, in both directions.
    async fn nodes_ping_each_other(&self) {
        let [a, b] = &self.tenants;
        let hub = (&self.hub, &self.hub_webs);
        for [(from, from_pods), (to, to_pods)] in [
            [hub, (&a.cluster, &a.webs)],
            [(&a.cluster, &a.webs), (&b.cluster, &b.webs)],
            [(&b.cluster, &b.webs), hub],
        ] {
            for [(_, clients), (cluster, targets)] in
                [[(from, from_pods), (to, to_pods)], [(to, to_pods), (from, from_pods)]]
            {
                let address = wireguard(cluster, &targets[0].node).await;
                let client = host(&clients[0].node);
                wait_until(format!("{client} to reach {address}"), PATIENCE, async || {
                    let answered = self.lab.ping(&client, address).await;
                    answered
                        .map_err(|error| error.to_string())?
                        .then_some(())
                        .ok_or("no reply".to_owned())
                })
                .await
                .unwrap();
            }
        }
    }

    /// An address of the equal networks leads a client in a tenant only to a pod of the same tenant, and a client in the hub to
    /// no pod.
    async fn tenants_pods_are_reached_only_in_their_cluster(&self) {
        let [a, b] = &self.tenants;
        for to in &a.webs {
            let at = url(to.ip, 8080);
            let answer = self.lab.http_get(&pod(&self.hub_webs[0]), &at).await.unwrap();
            assert!(answer.is_err(), "{answer:?}");
            for from in &b.webs {
                match self.lab.http_get(&pod(from), &at).await.unwrap() {
                    Ok(answer) => assert!(b.webs.iter().any(|web| web.name == answer.pod), "{answer:?}"),
                    Err(error) => println!("{} has no pod {}: {error}", from.node, to.ip),
                }
            }
        }
    }

    /// Of two `Routed` members with equal networks, the first one is accepted. Ready is False and names the network. The second
    /// one stays masqueraded and keeps its tunnels. Its pods reach each other, although pods of the first one have the same
    /// addresses.
    async fn second_routed_tenant_stays_masqueraded(&self, egress: &[(&str, &str)]) {
        let [a, b] = &self.tenants;
        let before = self.peers_of(&self.hub, TENANTS[1]).await;
        self.hub.apply(&self.product.mesh(egress)).await.unwrap();
        let message = wait_until("the mesh to refuse equal pod networks", PATIENCE, async || {
            let mesh = json(&self.hub, &["-n", NAMESPACE, "get", "clustermesh", MESH]).await;
            let conditions = mesh["status"]["conditions"].as_array().unwrap();
            let ready = conditions.iter().find(|one| one["type"] == "Ready").unwrap();
            let message = ready["message"].as_str().unwrap_or_default();
            let peers = self.peers_of(&self.hub, TENANTS[0]).await;
            let pods = a.cluster.plan().pod_cidr.to_string();
            let is_routed = !peers.is_empty()
                && peers
                    .iter()
                    .all(|peer| peer["allowedIPs"].as_array().unwrap().len() > 1);
            if ready["status"] == "False" && message.contains(&pods) && is_routed {
                Ok(message.to_owned())
            } else {
                Err(format!("{ready} {peers:?}"))
            }
        })
        .await
        .unwrap();
        println!("{message}");
        assert_eq!(self.peers_of(&self.hub, TENANTS[1]).await, before);
        for to in &a.webs {
            let from = &self.hub_webs[0];
            let answer = self.lab.http_get_until_answered(&pod(from), &url(to.ip, 8080)).await;
            assert_eq!(answer.unwrap(), expected_answer(to, from.ip));
        }
        self.pods_reach_hub_from_their_nodes_address(b).await;
        self.pods_of_tenant_reach_each_other(b).await;

        let masqueraded = self.product.mesh_masqueraded(&TENANTS, egress);
        self.product.mesh_up(&masqueraded).await.unwrap();
        self.pods_reach_hub_from_their_nodes_address(a).await;
    }

    /// By pod IP and by the tenant's own Service.
    async fn pods_of_tenant_reach_each_other(&self, tenant: &Tenant<'_>) {
        let service = tenant.cluster.cluster_ip("default", "web").await.unwrap();
        for from in &tenant.webs {
            for to in &tenant.webs {
                let answer = self.lab.http_get_until_answered(&pod(from), &url(to.ip, 8080)).await;
                assert_eq!(answer.unwrap(), expected_answer(to, from.ip));
            }
            for client in [pod(from), host(&from.node)] {
                let answer = self
                    .lab
                    .http_get_until_answered(&client, &url(service, 80))
                    .await
                    .unwrap();
                assert!(tenant.webs.iter().any(|web| web.name == answer.pod), "{answer:?}");
            }
        }
    }

    /// The specs of the Peers of `source` in `cluster`.
    async fn peers_of(&self, cluster: &Cluster<'_>, source: &str) -> Vec<Value> {
        let peers = json(cluster, &["get", "peers"]).await;
        let peers = peers["items"].as_array().unwrap().iter();
        let is_of_source = |peer: &&Value| {
            peer["metadata"]["name"]
                .as_str()
                .unwrap()
                .starts_with(&format!("{MESH}--{source}--"))
        };
        peers.filter(is_of_source).map(|peer| peer["spec"].clone()).collect()
    }
}

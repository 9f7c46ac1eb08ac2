//! Tests the report that Nodes of one member have addresses in a network of another member.

use super::*;

fn in_use(mesh: &Mesh, seen: &Observations) -> Vec<(String, String)> {
    let (_, mesh_plan) = plan_mesh(mesh, seen);
    let facts = mesh_plan.facts.into_iter();
    facts
        .filter_map(|fact| match fact {
            Fact::NetworkInUse { cluster, message } => Some((cluster, message)),
            _ => None,
        })
        .collect()
}

#[test]
fn node_addresses_in_other_members_network_are_reported_once() {
    let mesh = two_clusters();
    let mut seen = seen();
    assert_eq!(in_use(&mesh, &seen), []);
    edit(&mut seen, &ClusterIdentity::Local, |m| {
        for (name, address) in [("a", "100.66.2.7"), ("b", "100.66.2.8")] {
            let addresses = &mut m.nodes.get_mut(name).unwrap().internal_ips;
            addresses.push(address.parse().unwrap());
        }
    });
    let message = "2 Node(s) of cluster \"mgmt\" use addresses of 100.66.2.0/24, first a: 100.66.2.7; packets to these addresses \
                   are lost or enter the mesh. Give cluster \"tenant\" another network";
    assert_eq!(in_use(&mesh, &seen), [("tenant".to_owned(), message.to_owned())]);
    let (_, mesh_plan) = plan_mesh(&mesh, &seen);
    let conditions = crate::status::conditions(&mesh_plan, &BTreeMap::new(), &BTreeMap::new(), &[], &BTreeMap::new());
    let degraded = conditions
        .iter()
        .find(|condition| condition.kind == "Degraded")
        .unwrap();
    assert_eq!(
        (degraded.status, degraded.reason, &*degraded.message),
        (true, "NetworkInUse", &*format!("cluster \"tenant\": {message}"))
    );

    // Kilo's endpoint annotation counts as an address.
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().kilo_endpoint = Claim::Valid(Endpoint::Ip("10.1.1.9:51820".parse().unwrap()));
    });
    let [(cluster, message), _] = &in_use(&mesh, &seen)[..] else {
        panic!("{:?}", in_use(&mesh, &seen));
    };
    assert_eq!(cluster, "mgmt");
    assert!(
        message.contains("use addresses of 10.1.0.0/16, first x: 10.1.1.9"),
        "{message}"
    );

    // With endpointNetworks, each of the two members declares that its Nodes may have addresses in the network of the other.
    let mut hosted = mesh.clone();
    hosted.clusters[0].endpoint_networks = nets(&["100.66.2.0/24"]);
    hosted.clusters[1].endpoint_networks = nets(&["10.1.0.0/16"]);
    assert_eq!(in_use(&hosted, &seen), []);
}

#[test]
fn wireguard_network_of_kg_that_contains_another_is_reported() {
    let mesh = two_clusters();
    let reported_with = |server: Server| {
        let mut seen = seen();
        edit(&mut seen, &ClusterIdentity::Local, |m| {
            let node = m.nodes.get_mut("a").unwrap();
            node.wireguard_ip = Claim::Valid("100.66.1.1/16".parse().unwrap());
            node.server = server;
        });
        in_use(&mesh, &seen)
    };
    // kg routes the node's whole WireGuard network into its interface, so the message names this network instead of an address.
    // wg-agent does not route it.
    let message = "1 Node(s) of cluster \"mgmt\" use addresses of 100.66.2.0/24, first a: 100.66.0.0/16; packets to these \
                   addresses are lost or enter the mesh. Give cluster \"tenant\" another network";
    assert_eq!(reported_with(Server::Kilo), [("tenant".to_owned(), message.to_owned())]);
    assert_eq!(reported_with(Server::Agent), []);
}

#[test]
fn addresses_of_sandbox_nodes_report_no_network_in_use() {
    let mut mesh = two_clusters();
    mesh.clusters[1].profile = Profile::Sandbox;
    let mut seen = seen();
    edit(&mut seen, &secret("tenant"), |m| {
        m.nodes.get_mut("x").unwrap().internal_ips = vec!["10.1.1.7".parse().unwrap()];
    });
    assert_eq!(in_use(&mesh, &seen), []);
    mesh.clusters[1].profile = Profile::ClusterMeshed;
    assert_eq!(in_use(&mesh, &seen).len(), 1);
}

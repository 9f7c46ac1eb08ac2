//! Tests nodes behind NATs: endpoints that other nodes see, and keepalives.

use std::net::SocketAddr;

use super::*;

/// The address of the NAT in front of `x`, and the port to which the NAT maps WireGuard.
const NAT: &str = "198.51.100.9:40001";

fn socket(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A mesh of the hub and two tenants. `x` of `tenant` and `y` of `branch` have only private addresses.
fn three_clusters() -> (Mesh, Observations) {
    let mut mesh = two_clusters();
    mesh.clusters
        .push(entry("branch", secret("branch"), &["10.3.0.0/16", "100.66.3.0/24"]));
    let mut seen = seen();
    let y = member(&[("y", node(3, 1))]);
    seen.members.insert(secret("branch"), Observation::Fresh(y));
    for (cluster, name, address) in [("tenant", "x", "192.168.2.1"), ("branch", "y", "192.168.3.1")] {
        edit(&mut seen, &secret(cluster), |member| {
            let node = member.nodes.get_mut(name).unwrap();
            node.internal_ips = vec![address.parse().unwrap()];
            node.kilo_endpoint = Claim::Valid(Endpoint::Ip(SocketAddr::new(node.internal_ips[0], 51820)));
        });
    }
    (mesh, seen)
}

/// Lets a node report the endpoint at which it sees the node with this key.
fn report(seen: &mut Observations, by: (&ClusterIdentity, &str), key: PublicKey, endpoint: &str) {
    edit(seen, by.0, |member| {
        let node = member.nodes.get_mut(by.1).unwrap();
        node.discovered.insert(key, socket(endpoint));
    });
}

fn spec(mesh: &Mesh, seen: &Observations, target: &str, peer: &str) -> PeerSpec {
    plan_mesh(mesh, seen).1.targets[target].peers[peer]
        .spec
        .as_ref()
        .clone()
}

/// The endpoints of a Peer, best first.
fn endpoints(mesh: &Mesh, seen: &Observations, target: &str, peer: &str) -> Vec<SocketAddr> {
    let spec = spec(mesh, seen, target, peer);
    match (&*spec.candidates, spec.endpoint) {
        ([], Some(Endpoint::Ip(only))) => vec![only],
        _ => spec.candidates,
    }
}

/// The number that [`key`] takes for the key of `x`.
const X_KEY: u8 = 2 * 16 + 1;
/// The number that [`key`] takes for the key of `y`.
const Y_KEY: u8 = 3 * 16 + 1;
/// The name of the Peer of `x`.
const X_PEER: &str = "m--tenant--x";

#[test]
fn endpoint_seen_by_hub_is_last_candidate_for_other_tenant() {
    let (mesh, mut seen) = three_clusters();
    let internal = vec![socket("192.168.2.1:51820")];
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), internal);
    report(&mut seen, (&ClusterIdentity::Local, "a"), key(X_KEY), NAT);
    let with_nat = vec![internal[0], socket(NAT)];
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), with_nat);
    // The target's own nodes have proof that the endpoint works, so it comes before the private address.
    let in_hub = endpoints(&mesh, &seen, "mgmt", X_PEER);
    assert_eq!(in_hub, [with_nat[1], with_nat[0]]);
    // An explicit endpoint comes before both.
    edit(&mut seen, &secret("tenant"), |member| {
        let x = member.nodes.get_mut("x").unwrap();
        x.clustermesh_endpoint = Claim::Valid(Endpoint::Ip(socket("203.0.113.7:4500")));
    });
    let explicit = [&[socket("203.0.113.7:4500")], &with_nat[..]].concat();
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), explicit);
}

#[test]
fn reports_of_other_members_change_no_peer_for_kg() {
    let (mesh, mut seen) = three_clusters();
    report(&mut seen, (&ClusterIdentity::Local, "a"), key(X_KEY), NAT);
    report(&mut seen, (&secret("tenant"), "x"), key(Y_KEY), "198.51.100.10:40001");
    edit(&mut seen, &secret("branch"), |member| {
        member.nodes.get_mut("y").unwrap().server = Server::Kilo;
    });
    assert_eq!(spec(&mesh, &seen, "branch", X_PEER).persistent_keepalive, 0);
    let candidates = endpoints(&mesh, &seen, "branch", X_PEER);
    assert_eq!(candidates, [socket("192.168.2.1:51820")]);
}

#[test]
fn node_seen_at_other_address_gets_short_keepalive() {
    let (mut mesh, mut seen) = three_clusters();
    // The keepalive with which `x` sends to the hub, and that with which the hub sends to `x`.
    let keepalive = |mesh: &Mesh, seen: &Observations| {
        [("tenant", "m--mgmt--a"), ("mgmt", X_PEER)]
            .map(|(target, peer)| spec(mesh, seen, target, peer).persistent_keepalive)
    };
    assert_eq!(keepalive(&mesh, &seen), [0, 0]);
    report(&mut seen, (&ClusterIdentity::Local, "a"), key(X_KEY), NAT);
    assert_eq!(
        keepalive(&mesh, &seen),
        [25, 0],
        "only the node behind the NAT sends keepalives"
    );
    for (configured, short) in [(60, 25), (25, 25), (10, 10)] {
        mesh.clusters[0].persistent_keepalive = configured;
        assert_eq!(keepalive(&mesh, &seen), [short, configured]);
    }
    mesh.clusters[0].persistent_keepalive = 0;
    // The report ends. The keepalive stays until the node publishes an address that is not private.
    write_plan(&mesh, &mut seen);
    let reported = seen.clone();
    let forget = |seen: &mut Observations| {
        edit(seen, &ClusterIdentity::Local, |member| {
            member.nodes.get_mut("a").unwrap().discovered.clear()
        });
    };
    forget(&mut seen);
    assert_eq!(keepalive(&mesh, &seen), [25, 0]);
    edit(&mut seen, &secret("tenant"), |member| {
        member.nodes.get_mut("x").unwrap().external_ips = vec!["198.51.100.9".parse().unwrap()];
    });
    assert_eq!(keepalive(&mesh, &seen), [0, 0]);
    // `x` is seen at its own address, but at another port: another socket of `x`, not a NAT. There are no existing Peers,
    // so no keepalive stays.
    seen = reported;
    edit(&mut seen, &secret("tenant"), |member| {
        member.peers = Some(Rows::default())
    });
    report(
        &mut seen,
        (&ClusterIdentity::Local, "a"),
        key(X_KEY),
        "192.168.2.1:40001",
    );
    assert_eq!(keepalive(&mesh, &seen), [0, 0]);
}

#[test]
fn two_endpoints_reported_by_one_member_are_candidates() {
    // The NAT has mapped x to another port. One node of the hub has seen that already.
    let (mesh, mut seen) = three_clusters();
    report(&mut seen, (&ClusterIdentity::Local, "a"), key(X_KEY), NAT);
    report(
        &mut seen,
        (&ClusterIdentity::Local, "b"),
        key(X_KEY),
        "198.51.100.9:41001",
    );
    let wanted = ["192.168.2.1:51820", NAT, "198.51.100.9:41001"].map(socket);
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), wanted);
}

// threat: forged-discovered-endpoint
#[test]
fn false_reports_leave_other_candidates_in_place() {
    let (mut mesh, mut seen) = three_clusters();
    mesh.clusters
        .push(entry("evil", secret("evil"), &["10.4.0.0/16", "100.66.4.0/24"]));
    let evil = member(&[("e1", node(4, 1)), ("e2", node(4, 2))]);
    seen.members.insert(secret("evil"), Observation::Fresh(evil));
    report(&mut seen, (&ClusterIdentity::Local, "b"), key(X_KEY), NAT);
    // "evil" sorts before "mgmt" and reports two endpoints. A Peer gets at most two endpoints that other members report. The members take
    // turns, the hub first, so one endpoint of "evil" is used.
    report(&mut seen, (&secret("evil"), "e1"), key(X_KEY), "203.0.113.66:1");
    report(&mut seen, (&secret("evil"), "e2"), key(X_KEY), "203.0.113.66:2");
    let wanted = ["192.168.2.1:51820", NAT, "203.0.113.66:1"].map(socket);
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), wanted);
    // Endpoints that no target may use are left out, and so are those inside this target's own networks.
    for forbidden in ["10.3.0.5:22", "127.0.0.1:51820", "224.0.0.1:51820", "203.0.113.66:0"] {
        for node in ["e1", "e2"] {
            report(&mut seen, (&secret("evil"), node), key(X_KEY), forbidden);
        }
        assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), wanted[..2], "{forbidden}");
    }
    // Reports of a Ready node of a trusted member count.
    report(&mut seen, (&secret("evil"), "e1"), key(X_KEY), "203.0.113.66:1");
    report(&mut seen, (&secret("evil"), "e2"), key(X_KEY), "203.0.113.66:1");
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), wanted);
    // Reports of a sandbox, of a quarantined member and of Nodes that are not Ready are ignored.
    let mut untrusted = mesh.clone();
    untrusted.clusters[3].profile = Profile::Sandbox;
    assert_eq!(endpoints(&untrusted, &seen, "branch", X_PEER), wanted[..2]);
    untrusted.clusters[3].profile = Profile::ClusterMeshed;
    untrusted.clusters[3].quarantine = true;
    assert_eq!(endpoints(&untrusted, &seen, "branch", X_PEER), wanted[..2]);
    edit(&mut seen, &secret("evil"), |member| {
        member.nodes.values_mut().for_each(|node| node.ready = false);
    });
    assert_eq!(endpoints(&mesh, &seen, "branch", X_PEER), wanted[..2]);
}

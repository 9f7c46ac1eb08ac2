//! Tests the NAT routers: mapping and filtering of each kind, as RFC 4787 defines them.

use std::net::{Ipv4Addr, SocketAddr};

use clustermesh_lab::{Lab, LabPlan, NatKind, Node};

const PORT: u16 = 51820;
const INITIAL_KIND: NatKind = NatKind::EndpointIndependent { first_port: 40001 };

/// Sends datagrams from port [`PORT`] of a host to each of these sockets, for two seconds. The text of each datagram is `51820`.
/// Returns sender and text of the datagrams that the host receives, without duplicates. An echo server puts the endpoint at which
/// it sees the host in front of the text.
async fn exchange(from: &Node<'_>, to: &[SocketAddr]) -> Vec<(SocketAddr, String)> {
    let mut words = [env!("CARGO_BIN_EXE_lab-probe"), "udp-talk", "51820", "2"]
        .map(str::to_owned)
        .to_vec();
    words.extend(to.iter().map(ToString::to_string));
    let output = from.exec(words).await.unwrap().stdout;
    let lines = output.lines().filter_map(|line| line.split_once(' '));
    lines
        .map(|(sender, text)| (sender.parse().unwrap(), text.to_owned()))
        .collect()
}

/// The endpoint at which each of the servers sees the host.
async fn seen_at(from: &Node<'_>, servers: &[SocketAddr]) -> Vec<SocketAddr> {
    let answers = exchange(from, servers).await;
    let seen_by = |server: &SocketAddr| {
        let answer = answers.iter().find(|(sender, _)| sender == server);
        let (_, text) = answer.unwrap_or_else(|| panic!("{server} did not answer: {answers:?}"));
        text.split_once(' ').unwrap().0.parse().unwrap()
    };
    servers.iter().map(seen_by).collect()
}

/// Each of two hosts sends to the other's public endpoint at the same time. Returns whether each receives something. The parameters
/// are the hosts with their public endpoints.
async fn exchange_both_ways(one: (&Node<'_>, SocketAddr), other: (&Node<'_>, SocketAddr)) -> [bool; 2] {
    let (to_one, to_other) = ([one.1], [other.1]);
    let (at_one, at_other) = tokio::join!(exchange(one.0, &to_other), exchange(other.0, &to_one));
    [!at_one.is_empty(), !at_other.is_empty()]
}

#[tokio::test]
async fn nat_routers_map_and_filter_as_their_kind_says() {
    let plan = LabPlan::control_planes(&["a", "b"])
        .with_nat("a", "192.168.1.0/24", INITIAL_KIND)
        .with_nat("b", "100.64.2.0/24", INITIAL_KIND);
    let lab = Lab::start(plan).await.unwrap();
    let mut servers = vec![];
    let mut echoes = vec![];
    for n in [1, 2] {
        let server = lab
            .add_host(&format!("s{n}"), Ipv4Addr::new(172, 30, 200, n))
            .await
            .unwrap();
        echoes.push(
            server
                .spawn("echo", [env!("CARGO_BIN_EXE_lab-probe"), "udp-echo", ":51820"])
                .unwrap(),
        );
        servers.push(SocketAddr::new(server.address(), PORT));
    }
    let stranger = lab.add_host("stranger", Ipv4Addr::new(172, 30, 200, 3)).await.unwrap();
    let a1 = lab.add_host_behind_nat("a1", "a", 1).await.unwrap();
    let a2 = lab.add_host_behind_nat("a2", "a", 2).await.unwrap();
    let b1 = lab.add_host_behind_nat("b1", "b", 1).await.unwrap();
    let public = |cluster: &str, port| SocketAddr::new(lab.cluster(cluster).plan().nat_address().into(), port);

    // Endpoint-independent mapping: the same port for every server, another one for each host.
    assert_eq!(seen_at(&a1, &servers).await, [public("a", 40001); 2]);
    assert_eq!(seen_at(&a2, &servers).await, [public("a", 40002); 2]);
    // Address and port-dependent filtering: a1 receives datagrams only from addresses and ports to which it sends.
    let to_a1 = [public("a", 40001)];
    let (at_a1, _) = tokio::join!(exchange(&a1, &servers[..1]), exchange(&stranger, &to_a1));
    let senders: Vec<SocketAddr> = at_a1.iter().map(|(sender, _)| *sender).collect();
    assert_eq!(senders, servers[..1]);
    // Two hosts that send to each other's public endpoint reach each other. A NAT drops packets only until its own host has sent.
    let b = (&b1, public("b", 40001));
    assert_eq!(exchange_both_ways((&a1, public("a", 40001)), b).await, [true; 2]);

    // A new mapping, as after a restart of the router.
    lab.set_nat("a", NatKind::EndpointIndependent { first_port: 41001 })
        .await
        .unwrap();
    assert_eq!(seen_at(&a1, &servers).await, [public("a", 41001); 2]);
    assert_eq!(
        exchange_both_ways((&a1, public("a", 40001)), b).await,
        [false; 2],
        "the old endpoint"
    );

    // Address and port-dependent mapping: the endpoint that one server sees is of no use for another host.
    lab.set_nat("a", NatKind::EndpointDependent).await.unwrap();
    let seen = seen_at(&a1, &servers).await;
    assert_ne!(seen[0].port(), seen[1].port());
    assert_eq!(exchange_both_ways((&a1, seen[0]), b).await, [false; 2]);

    // One-to-one: a public address for each host. A packet from outside reaches the host, even if the host sends none.
    lab.set_nat("a", NatKind::OneToOne).await.unwrap();
    let [own, other] = [1, 2].map(|n| SocketAddr::new(lab.cluster("a").plan().one_to_one_address(n).into(), PORT));
    assert_eq!(seen_at(&a1, &servers).await, [own; 2]);
    assert_eq!(seen_at(&a2, &servers).await, [other; 2]);
    let to_a1 = [own];
    let (at_a1, _) = tokio::join!(exchange(&a1, &[]), exchange(&stranger, &to_a1));
    assert_eq!(at_a1, [(SocketAddr::new(stranger.address(), PORT), PORT.to_string())]);
}

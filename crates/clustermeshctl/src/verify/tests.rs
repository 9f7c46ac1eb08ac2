use std::path::{Path as File, PathBuf};

use clustermesh_core::plan::Settings;

use super::{
    jobs::Answer,
    judge::{Item, Judge, Path},
    *,
};
use crate::args::{Args, Command};

/// The hub with a gateway, a tenant that is trusted, a sandbox that may reach one Service; no Peer is written yet.
async fn world() -> Outcome {
    let fixtures = File::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut words = vec!["clustermeshctl".to_owned(), "plan".to_owned()];
    let path = |file: &str| -> PathBuf { fixtures.join(file) };
    words.push(format!("-f={}", path("explain/mesh.yaml").display()));
    for (cluster, file) in [
        ("mgmt", "agents/mgmt.yaml"),
        ("mgmt", "explain/mgmt.yaml"),
        ("mgmt", "explain/gateways.yaml"),
        ("tenant-a", "agents/tenant-a"),
        ("tenant-a", "explain/tenant-a.yaml"),
        ("notebooks", "explain/notebooks.yaml"),
    ] {
        words.push(format!("--cluster={cluster}={}", path(file).display()));
    }
    let Command::Plan(plan) = <Args as clap::Parser>::try_parse_from(words).unwrap().command else {
        unreachable!("the words above are a plan");
    };
    let read = Outcome::read(&plan.given, &mut std::io::empty(), &mut Vec::new()).await;
    read.unwrap_or_else(|problems| panic!("{problems:?}"))
}

/// What is found from a pod with this address, if the hub's sockets answer so. The tunnel leads to 10.244.1.20 alone and, from the
/// sandbox, to the gateway.
fn row(
    outcome: &Outcome,
    (cluster, node, pod): (&str, &str, &str),
    answer: impl Fn(SocketAddr) -> &'static str,
) -> Row {
    let identity = |name: &str| {
        let (identity, _) = outcome.world.sources.iter().find(|(_, other)| *other == name).unwrap();
        identity
    };
    let hub = identity("mgmt");
    let all = sockets::of(
        outcome.world.seen(hub).unwrap(),
        &outcome.settings,
        &accesses(outcome, hub),
    );
    let place = Place {
        cluster: cluster.to_owned(),
        node: node.to_owned(),
        host: false,
    };
    let said = |socket: &SocketAddr| Answer {
        answer: answer(*socket).to_owned(),
        way: None,
    };
    let answers = Answers {
        place: place.clone(),
        addresses: vec![pod.parse().unwrap()],
        by_socket: all.keys().map(|socket| (*socket, said(socket))).collect(),
    };
    let by = |address: IpAddr| {
        let tunnel: &[&str] = match cluster {
            "notebooks" => &["10.244.1.20", "100.66.255.1"],
            _ => &["10.244.1.20"],
        };
        if tunnel.contains(&&*address.to_string()) {
            "kilo0"
        } else {
            "eth0"
        }
    };
    let ways = all
        .keys()
        .map(|socket| (socket.ip(), Some(by(socket.ip()).to_owned())))
        .collect();
    let judge = Judge {
        outcome,
        place: &place,
        from: identity(cluster),
        confined: cluster == "notebooks",
        device: "kilo0",
        answers: &answers,
        ways: Some(&ways),
    };
    let by_reference: BTreeMap<SocketAddr, &Socket> = all.iter().map(|(socket, what)| (*socket, what)).collect();
    judge.row("mgmt", identity("mgmt"), &by_reference)
}

fn on(items: &[Item], path: Path) -> Vec<String> {
    let items = items.iter().filter(|item| item.path == path);
    items.map(|item| item.socket.to_string()).collect()
}

const SANDBOX: (&str, &str, &str) = ("notebooks", "nb1", "10.243.0.9");
const TENANT: (&str, &str, &str) = ("tenant-a", "w1", "10.20.1.9");

#[tokio::test]
async fn from_a_sandbox_whatever_answers_but_the_grant_is_a_violation_by_the_tunnel_and_beside_it() {
    let row = row(&world().await, SANDBOX, |_| "open");
    assert_eq!(on(&row.open, Path::Tunnel), ["100.66.255.1:24040"]);
    let tunnel = on(&row.violations, Path::Tunnel);
    // The endpoint itself, a grant that is planned no more, the gateway's own port.
    for socket in [
        "10.244.1.20:5432",
        "10.244.1.20:9187",
        "100.66.255.1:21000",
        "100.66.255.1:9587",
    ] {
        assert!(tunnel.iter().any(|one| one == socket), "{socket} is not in {tunnel:?}");
    }
    let beside = on(&row.violations, Path::Underlay);
    for socket in [
        "192.168.1.11:10250",
        "100.66.0.2:9587",
        "10.244.0.10:6443",
        "10.96.0.1:443",
        "192.168.1.12:22",
    ] {
        assert!(beside.iter().any(|one| one == socket), "{socket} is not in {beside:?}");
    }
    assert_eq!(row.tried, 1 + tunnel.len() + beside.len());
    assert_eq!(
        row.open[0].what,
        "gateway clustermesh-gateway/gateway-0 for Service team-x/postgres-rw"
    );
    assert!(row.beside.is_empty() && row.unanswered.is_empty() && row.refused.is_empty());
}

#[tokio::test]
async fn silent_gateway_is_reported_with_what_to_look_at() {
    let row = row(&world().await, SANDBOX, |_| "silent");
    let [item] = &*row.unanswered else {
        panic!("{:?}", row.unanswered)
    };
    assert_eq!(item.socket.to_string(), "100.66.255.1:24040");
    assert!(item.message.contains("kubectl get sandboxgateways"), "{}", item.message);
    assert!(row.open.is_empty() && row.violations.is_empty());
}

#[tokio::test]
async fn a_port_that_the_operator_names_is_tried_on_every_node() {
    let outcome = world().await;
    let seen = outcome.world.given.get("mgmt").unwrap();
    let ports = ["8132/TCP", "8133/UDP"].map(|text| text.parse().unwrap());
    let more = sockets::of(seen, &Settings::closing(&ports).unwrap(), &[]);
    let before = sockets::of(seen, &outcome.settings, &[]);
    let more: Vec<String> = (more.keys())
        .filter(|socket| !before.contains_key(socket))
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        more,
        [
            "100.66.0.1:8132",
            "100.66.0.2:8132",
            "100.66.255.1:8132",
            "192.168.1.11:8132",
            "192.168.1.12:8132"
        ]
    );
}

#[tokio::test]
async fn what_a_trusted_member_reaches_beside_the_mesh_is_told_and_no_violation() {
    let row = row(&world().await, TENANT, |_| "open");
    assert_eq!(on(&row.open, Path::Tunnel), ["10.244.1.20:5432", "10.244.1.20:9187"]);
    assert!(row.violations.is_empty(), "{:?}", row.violations);
    assert!(on(&row.beside, Path::Underlay).contains(&"192.168.1.11:10250".to_owned()));
}

#[tokio::test]
async fn what_is_refused_without_a_grant_is_told_and_no_violation() {
    let row = row(&world().await, SANDBOX, |_| "refused");
    assert!(on(&row.refused, Path::Tunnel).contains(&"10.244.1.20:9187".to_owned()));
    assert!(row.violations.is_empty());
}

#[tokio::test]
async fn what_means_something_of_its_own_where_it_is_asked_for_is_not_tried_and_neither_is_what_the_operator_allows() {
    let outcome = world().await;
    let name = |name: &str| outcome.world.given.get(name).unwrap();
    let allowed: Vec<Allowed> = ["192.0.2.7", "10.96.0.10:53"]
        .map(|text| text.parse().unwrap())
        .to_vec();
    let own = Own::of(name("notebooks"), vec!["100.80.16.0/20".parse().unwrap()], &allowed);
    for (socket, itself) in [
        ("10.243.0.77:80", true),
        ("100.80.16.9:22", true),
        ("172.18.0.7:10250", true),
        ("10.95.0.1:443", true),
        ("198.51.100.30:6443", true),
        ("198.51.100.30:22", false),
        ("192.0.2.7:1", true),
        ("10.96.0.10:53", true),
        ("10.96.0.10:9153", false),
        ("10.244.1.20:5432", false),
    ] {
        assert_eq!(own.means_itself(socket.parse().unwrap()), itself, "{socket}");
    }
    let wrong = "write ADDRESS or ADDRESS:PORT, as 10.96.0.10:53 or [fd00::10]:53".to_owned();
    assert_eq!("resolver:53".parse::<Allowed>(), Err(wrong));
}

#[tokio::test]
async fn the_exit_code_says_the_worst_that_was_found() {
    let outcome = world().await;
    let report = |answer: &'static str, missing: &[&str]| Report {
        rows: vec![row(&outcome, SANDBOX, move |socket| {
            if socket.to_string() == "100.66.255.1:24040" {
                answer
            } else {
                "silent"
            }
        })],
        missing: missing.iter().map(|text| (*text).to_owned()).collect(),
        notes: Vec::new(),
    };
    assert_eq!(Report::default().code(), CANNOT_TELL);
    assert_eq!(report("open", &[]).code(), 0);
    assert_eq!(report("silent", &[]).code(), UNANSWERED);
    assert_eq!(report("silent", &["a node"]).code(), CANNOT_TELL);
    let mut open = report("open", &["a node"]);
    open.rows.push(row(&outcome, SANDBOX, |_| "open"));
    assert_eq!(open.code(), VIOLATION);
}

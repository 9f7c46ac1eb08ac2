use std::{
    net::IpAddr,
    path::{Path as FilePath, PathBuf},
};

use clustermesh_core::plan::Settings;

use super::{
    classify::{Classifier, Finding, Path},
    jobs::Answer,
    *,
};
use crate::args::{Args, Command};

/// The plan for a hub with a gateway, a cluster-meshed tenant, and a sandbox with a grant for one Service. No Peer is written yet.
async fn planned() -> PlanResult {
    let fixtures = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut args = vec!["clustermeshctl".to_owned(), "plan".to_owned()];
    let path = |file: &str| -> PathBuf { fixtures.join(file) };
    args.push(format!("-f={}", path("explain/mesh.yaml").display()));
    for (cluster, file) in [
        ("mgmt", "agents/mgmt.yaml"),
        ("mgmt", "explain/mgmt.yaml"),
        ("mgmt", "explain/gateways.yaml"),
        ("tenant-a", "agents/tenant-a"),
        ("tenant-a", "explain/tenant-a.yaml"),
        ("notebooks", "explain/notebooks.yaml"),
    ] {
        args.push(format!("--cluster={cluster}={}", path(file).display()));
    }
    let Command::Plan(plan) = <Args as clap::Parser>::try_parse_from(args).unwrap().command else {
        unreachable!("the command above is plan");
    };
    let read = PlanResult::read(&plan.input, &mut std::io::empty(), &mut Vec::new()).await;
    read.unwrap_or_else(|problems| panic!("{problems:?}"))
}

/// Classifies the answers of the hub's sockets to a pod with the address `pod_ip`. `answer` gives the answer of each socket. Only the
/// routes to 10.244.1.20 and, from the sandbox, to the gateway lead into the tunnel.
fn classify_hub_sockets(
    planned: &PlanResult,
    (cluster, node, pod_ip): (&str, &str, &str),
    answer: impl Fn(SocketAddr) -> &'static str,
) -> Row {
    let identity_of = |name: &str| {
        let (identity, _) = planned.inputs.names.iter().find(|(_, other)| *other == name).unwrap();
        identity
    };
    let hub = identity_of("mgmt");
    let all = sockets::collect(
        planned.inputs.cluster(hub).unwrap(),
        &planned.settings,
        &planned_accesses(planned, hub),
    );
    let source = ProbeSource {
        cluster: cluster.to_owned(),
        node: node.to_owned(),
        is_host: false,
    };
    let answer_of = |address: &SocketAddr| Answer {
        outcome: answer(*address).to_owned(),
        interface: None,
    };
    let answers = Answers {
        source: source.clone(),
        addresses: vec![pod_ip.parse().unwrap()],
        by_socket: all.keys().map(|address| (*address, answer_of(address))).collect(),
    };
    let interface = |address: IpAddr| {
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
    let interfaces = all
        .keys()
        .map(|address| (address.ip(), Some(interface(address.ip()).to_owned())))
        .collect();
    let classifier = Classifier {
        explainer: &planned.explainer(),
        source: &source,
        from: identity_of(cluster),
        is_underlay_checked: cluster == "notebooks",
        device: "kilo0",
        answers: &answers,
        interfaces: Some(&interfaces),
    };
    let by_reference: BTreeMap<SocketAddr, &Socket> = all.iter().map(|(address, socket)| (*address, socket)).collect();
    classifier.classify("mgmt", hub, &by_reference)
}

/// The sockets whose packets use this path.
fn sockets_on(findings: &[Finding], path: Path) -> Vec<String> {
    let findings = findings.iter().filter(|finding| finding.path == path);
    findings.map(|finding| finding.socket.to_string()).collect()
}

const SANDBOX: (&str, &str, &str) = ("notebooks", "nb1", "10.243.0.9");
const TENANT: (&str, &str, &str) = ("tenant-a", "w1", "10.20.1.9");

#[tokio::test]
async fn open_socket_without_grant_is_a_violation() {
    let row = classify_hub_sockets(&planned().await, SANDBOX, |_| "open");
    assert_eq!(sockets_on(&row.open, Path::Tunnel), ["100.66.255.1:24040"]);
    let tunnel = sockets_on(&row.violations, Path::Tunnel);
    // Two ports of the endpoint itself, a gateway port that only the existing SandboxAccess has (the planned one has 24040), and the
    // gateway's admin port.
    for socket in [
        "10.244.1.20:5432",
        "10.244.1.20:9187",
        "100.66.255.1:21000",
        "100.66.255.1:9587",
    ] {
        assert!(
            tunnel.iter().any(|found| found == socket),
            "{socket} is not in {tunnel:?}"
        );
    }
    let underlay = sockets_on(&row.violations, Path::Underlay);
    for socket in [
        "192.168.1.11:10250",
        "100.66.0.2:9587",
        "10.244.0.10:6443",
        "10.96.0.1:443",
        "192.168.1.12:22",
    ] {
        assert!(
            underlay.iter().any(|found| found == socket),
            "{socket} is not in {underlay:?}"
        );
    }
    assert_eq!(row.probed, 1 + tunnel.len() + underlay.len());
    assert_eq!(
        row.open[0].description,
        "gateway clustermesh-gateway/gateway-0 for Service team-x/postgres-rw"
    );
    assert!(row.on_underlay.is_empty() && row.unanswered.is_empty() && row.refused.is_empty());
}

#[tokio::test]
async fn silent_gateway_is_reported_with_a_hint() {
    let row = classify_hub_sockets(&planned().await, SANDBOX, |_| "silent");
    let [item] = &*row.unanswered else {
        panic!("{:?}", row.unanswered)
    };
    assert_eq!(item.socket.to_string(), "100.66.255.1:24040");
    assert!(item.message.contains("kubectl get sandboxgateways"), "{}", item.message);
    assert!(row.open.is_empty() && row.violations.is_empty());
}

#[tokio::test]
async fn infrastructure_port_is_probed_on_nodes_and_gateways() {
    let planned = planned().await;
    let read = planned.inputs.clusters.get("mgmt").unwrap();
    // Only TCP ports are probed.
    let ports = ["8132/TCP", "8133/UDP"].map(|text| text.parse().unwrap());
    let more = sockets::collect(read, &Settings::with_infrastructure_ports(&ports).unwrap(), &[]);
    let before = sockets::collect(read, &planned.settings, &[]);
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
async fn underlay_socket_open_to_cluster_meshed_is_no_violation() {
    let row = classify_hub_sockets(&planned().await, TENANT, |_| "open");
    assert_eq!(
        sockets_on(&row.open, Path::Tunnel),
        ["10.244.1.20:5432", "10.244.1.20:9187"]
    );
    assert!(row.violations.is_empty(), "{:?}", row.violations);
    assert!(sockets_on(&row.on_underlay, Path::Underlay).contains(&"192.168.1.11:10250".to_owned()));
}

#[tokio::test]
async fn refused_socket_without_grant_is_no_violation() {
    let row = classify_hub_sockets(&planned().await, SANDBOX, |_| "refused");
    assert!(sockets_on(&row.refused, Path::Tunnel).contains(&"10.244.1.20:9187".to_owned()));
    assert!(row.violations.is_empty());
}

#[tokio::test]
async fn own_addresses_and_those_of_underlay_allows_are_not_probed() {
    let planned = planned().await;
    let notebooks = planned.inputs.clusters.get("notebooks").unwrap();
    let allowed: Vec<UnderlayAllowed> = ["192.0.2.7", "10.96.0.10:53"]
        .map(|text| text.parse().unwrap())
        .to_vec();
    let excluded = ExcludedAddresses::new(notebooks, vec!["100.80.16.0/20".parse().unwrap()], &allowed);
    for (socket, is_excluded) in [
        // Own: pod CIDR, allowedNetworks, Node, ClusterIP; of the API server only its port.
        ("10.243.0.77:80", true),
        ("100.80.16.9:22", true),
        ("172.18.0.7:10250", true),
        ("10.95.0.1:443", true),
        ("198.51.100.30:6443", true),
        ("198.51.100.30:22", false),
        // Allowed: every port of one address, one port of another.
        ("192.0.2.7:1", true),
        ("10.96.0.10:53", true),
        ("10.96.0.10:9153", false),
        // Neither.
        ("10.244.1.20:5432", false),
    ] {
        assert_eq!(excluded.contains(socket.parse().unwrap()), is_excluded, "{socket}");
    }
    // Only addresses can be excluded, not names.
    let wrong = "write ADDRESS or ADDRESS:PORT, for example 10.96.0.10:53 or [fd00::10]:53".to_owned();
    assert_eq!("resolver:53".parse::<UnderlayAllowed>(), Err(wrong));
}

#[tokio::test]
async fn exit_code_reports_the_worst_result() {
    let planned = planned().await;
    let report = |answer: &'static str, not_probed: &[&str]| Report {
        rows: vec![classify_hub_sockets(&planned, SANDBOX, move |socket| {
            if socket.to_string() == "100.66.255.1:24040" {
                answer
            } else {
                "silent"
            }
        })],
        not_probed: not_probed.iter().map(|text| (*text).to_owned()).collect(),
        notes: Vec::new(),
    };
    assert_eq!(Report::default().code(), CANNOT_TELL);
    assert_eq!(report("open", &[]).code(), 0);
    assert_eq!(report("silent", &[]).code(), UNANSWERED);
    assert_eq!(report("silent", &["a node"]).code(), CANNOT_TELL);
    let mut open = report("open", &["a node"]);
    open.rows.push(classify_hub_sockets(&planned, SANDBOX, |_| "open"));
    assert_eq!(open.code(), VIOLATION);
}

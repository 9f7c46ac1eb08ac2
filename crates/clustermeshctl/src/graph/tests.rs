//! Tests the drawings of `graph`.

use serde_json::{Value, json};

use super::{model::Graph, svg, text};
use crate::status::fixture::{broken, healthy, make_unreachable, snapshot};

/// If this environment variable is set, the drawings are written into the folder that it names.
const FOLDER: &str = "GRAPH_TEST_FOLDER";

fn draw(meshes: impl IntoIterator<Item = Value>, name: &str) -> (String, String) {
    let (graph, notes) = Graph::new(&snapshot(meshes));
    assert_eq!(notes, [""; 0]);
    let svg = svg::render(&graph);
    if let Some(folder) = std::env::var_os(FOLDER) {
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.svg")), &svg).unwrap();
    }
    (text::render(&graph), svg)
}

#[test]
fn links_are_drawn_by_state() {
    let mut mesh = broken();
    // A member with the profile standard, one in quarantine, a sandbox with a grant in the hub, and a member without nodes.
    for (n, (name, profile)) in (100..).zip([
        ("parked", "standard"),
        ("closed", "cluster-meshed"),
        ("nb", "sandbox"),
        ("empty", "cluster-meshed"),
    ]) {
        let secret = json!({"name": format!("{name}-kubeconfig")});
        let network = format!("10.{n}.0.0/16");
        let clusters = mesh["spec"]["clusters"].as_array_mut().unwrap();
        clusters.push(json!({"name": name, "kubeconfigSecretRef": secret, "allowedNetworks": [network], "isolationProfile": profile}));
        let rows = mesh_rows(&mut mesh["status"]);
        let nodes = if name == "empty" { 0 } else { 2 };
        rows.push(json!({"name": name, "acceptedNetworks": [network], "registeredPeers": nodes, "reachable": true}));
    }
    let clusters = mesh["spec"]["clusters"].as_array_mut().unwrap();
    clusters[5]["quarantine"] = json!(true);
    clusters[6]["egress"] = json!([{"service": {"cluster": "mgmt", "namespace": "data", "name": "postgres-rw"}}]);
    mesh_rows(&mut mesh["status"])[0]["gateways"] = json!(1);
    let (text, svg) = draw([mesh], "states");
    insta::assert_snapshot!(text);
    insta::assert_snapshot!(svg);
}

fn mesh_rows(status: &mut Value) -> &mut Vec<Value> {
    status["clusters"].as_array_mut().unwrap()
}

#[test]
fn three_members_fit_on_a_screen() {
    let mut mesh = healthy("acme", &["tenant-a", "tenant-b"]);
    mesh["status"]["brokenLinks"] = json!([
        {"from": "tenant-a", "to": "mgmt", "up": 0, "total": 9},
        {"from": "tenant-b", "to": "mgmt", "up": 1, "total": 3},
    ]);
    // A second mesh has two of the members. The worse state counts.
    let mut other = healthy("acme", &["tenant-a"]);
    other["metadata"]["name"] = json!("other");
    let (text, _) = draw([mesh, other], "three");
    insta::assert_snapshot!(text);
}

/// Draws 49 meshes of the hub and one tenant each, and one mesh of the hub and 49 tenants.
#[test]
fn fifty_members_are_a_line_or_a_box_each() {
    let tenant = |n: usize| format!("tenant-{n:02}");
    let mut meshes: Vec<Value> = (1..50)
        .map(|n| healthy(&format!("team-{n:02}"), &[&tenant(n)]))
        .collect();
    make_unreachable(&mut meshes[4], "tenant-05", "2026-01-10T11:00:00Z");
    meshes[20]["status"]["brokenLinks"] = json!([{"from": "mgmt", "to": "tenant-21", "up": 4, "total": 6}]);
    meshes[30]["status"]["brokenLinks"] = json!([{"from": "mgmt", "to": "tenant-31", "up": 0, "total": 9}]);
    let (star, _) = draw(meshes, "star");
    let names: Vec<String> = (1..50).map(tenant).collect();
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    let mut mesh = healthy("acme", &names);
    make_unreachable(&mut mesh, "tenant-05", "2026-01-10T11:00:00Z");
    mesh["status"]["brokenLinks"] = json!([
        {"from": "mgmt", "to": "tenant-21", "up": 4, "total": 6},
        {"from": "tenant-10", "to": "tenant-21", "up": 0, "total": 9},
        {"from": "tenant-10", "to": "tenant-45", "up": 1, "total": 9},
    ]);
    let (full, svg) = draw([mesh], "full");
    let (star, full): (Vec<&str>, Vec<&str>) = (star.lines().collect(), full.lines().collect());
    let rows = |lines: &[&str]| lines.iter().filter(|line| !line.starts_with(' ')).count();
    assert_eq!((rows(&star), rows(&full)), (51, 51), "{star:#?}{full:#?}");
    let interesting = |lines: &[&str]| {
        lines
            .iter()
            .filter(|line| !line.ends_with("nodes: up: mgmt"))
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    insta::assert_snapshot!(interesting(&star).join("\n"));
    insta::assert_snapshot!(full[..12].join("\n"));
    // Of 1225 links, those of the hub are drawn, and the two between tenants that have tunnels down.
    assert_eq!(svg.matches("<title>").count(), 49 + 2);
}

#[test]
fn names_from_clusters_are_escaped_in_svg() {
    let (mut graph, _) = Graph::new(&snapshot([healthy("acme", &["tenant-a"])]));
    // No API server accepts this name; the drawing does not depend on that.
    graph.members[1].name = "<script>\"&".to_owned();
    let svg = svg::render(&graph);
    assert!(
        !svg.contains("<script") && svg.contains("&lt;script&gt;&quot;&amp;"),
        "{svg}"
    );
}

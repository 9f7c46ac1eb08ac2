//! Tests the built binary with `clustermeshctl explain` on files.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use tempfile::TempDir;

struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

/// The flags for the files of all clusters except `parked`. The mesh is on standard input.
const INPUT: &str = "-f - --cluster mgmt=agents/mgmt.yaml --cluster mgmt=explain/mgmt.yaml \
                     --cluster mgmt=explain/gateways.yaml --cluster tenant-a=agents/tenant-a \
                     --cluster tenant-a=explain/tenant-a.yaml --cluster notebooks=explain/notebooks.yaml";

/// The flags for recorded Nodes of two clusters that kg serves.
const KILO: &str = "-f kilo/mesh.yaml --cluster c1=kilo/nodes-c1.json --cluster c2=kilo/nodes-c2.json";

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn mesh() -> String {
    fs::read_to_string(fixtures().join("explain/mesh.yaml")).unwrap()
}

/// Runs a command in the folder of the fixtures, with a mesh on standard input.
fn run(args: &str, mesh: &str) -> Run {
    let mut child = Command::new(env!("CARGO_BIN_EXE_clustermeshctl"))
        .args(args.split_whitespace())
        .current_dir(fixtures())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(mesh.as_bytes());
    let output = child.wait_with_output().unwrap();
    Run {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn explain(from: &str, to: &str) -> Run {
    run(&format!("explain {from} {to} {INPUT}"), &mesh())
}

/// Returns the exit code and the rules of all addresses.
fn rules(from: &str, to: &str, mesh: &str) -> (Option<i32>, Vec<String>) {
    let run = run(&format!("explain {from} {to} {INPUT} -o json"), mesh);
    let answer: Value = serde_json::from_str(&run.out).unwrap_or_else(|_| panic!("{}{}", run.out, run.err));
    let answers = answer["answers"].as_array().unwrap();
    let rules = answers.iter().map(|answer| answer["rule"].as_str().unwrap().to_owned());
    (run.code, rules.collect())
}

#[test]
fn explain_table_shows_verdict_rule_and_path() {
    let queries = [
        // Between two cluster-meshed members: to a pod, to a Service (endpoint and ClusterIP), and to a node.
        ("tenant-a/default/app-0", "mgmt/team-x/web-0:8080"),
        ("tenant-a/default/app-0", "mgmt/team-x/svc/postgres-rw:5432"),
        ("tenant-a/default/agent", "mgmt/h2"),
        // To the kubelet and to the API server, which are closed to every member.
        ("tenant-a/w1", "mgmt/h1:10250"),
        ("10.20.0.5", "mgmt/default/svc/kubernetes:443"),
        // From a sandbox: only granted Services are allowed, also by the name of the mirrored Service. No member reaches a sandbox.
        ("notebooks/lab/nb-0", "mgmt/team-x/svc/postgres-rw"),
        ("notebooks/lab/nb-0", "notebooks/default/svc/postgres:5432"),
        ("notebooks/lab/nb-0", "mgmt/team-x/web-0:8080"),
        ("notebooks/lab/nb-0", "tenant-a/default/app-0:80"),
        ("mgmt/team-x/web-0", "notebooks/lab/nb-0:22"),
        // From and to nodes without a Peer, to a member with the profile standard, to an address of no member, to a port that the
        // Service does not have.
        ("tenant-a/default/app-1", "mgmt/team-x/web-0"),
        ("mgmt/team-x/web-0", "tenant-a/default/app-1:80"),
        ("tenant-a/default/app-0", "10.30.0.1:80"),
        ("tenant-a/default/app-0", "192.0.2.1:80"),
        ("tenant-a/default/app-0", "mgmt/team-x/svc/postgres-rw:80"),
    ];
    let mut printed = String::new();
    for (from, to) in queries {
        let run = explain(from, to);
        printed.push_str(&format!(
            "$ clustermeshctl explain {from} {to}\n{}exit {}\n\n",
            run.out,
            run.code.unwrap()
        ));
    }
    insta::assert_snapshot!(printed);
}

#[test]
fn explain_node_shows_peers_or_the_reason() {
    let queries = [
        // A node with a Peer, a node of a sandbox, a node without a Peer, and a node of the hub that is an anchor.
        format!("tenant-a/w1 {INPUT}"),
        format!("notebooks/nb1 {INPUT}"),
        format!("tenant-a/w2 {INPUT}"),
        format!("mgmt/h1 {INPUT}"),
        // A node that kg serves, and one whose location is led by another node.
        format!("c2/c2n2 {KILO}"),
        format!("c1/c1n2 {KILO}"),
        // An unknown Node, an unknown cluster, and an argument without a cluster.
        format!("tenant-a/w9 {INPUT}"),
        format!("tenant-z/w1 {INPUT}"),
        format!("w1 {INPUT}"),
    ];
    let mut printed = String::new();
    for query in queries {
        let run = run(&format!("explain node {query}"), &mesh());
        let (node, _) = query.split_once(' ').unwrap();
        printed.push_str(&format!(
            "$ clustermeshctl explain node {node}\n{}{}exit {}\n\n",
            run.out,
            run.err,
            run.code.unwrap()
        ));
    }
    insta::assert_snapshot!(printed);
}

#[test]
fn explain_json_and_yaml_match() {
    let args = format!("explain notebooks/lab/nb-0 mgmt/team-x/svc/postgres-rw:sql {INPUT} --output");
    let json = run(&format!("{args} json"), &mesh());
    assert_eq!(
        (json.code, &*json.err),
        (
            Some(0),
            "note: ignored, because a plan does not need them: 1 ConfigMap\n"
        )
    );
    let answer: Value = serde_json::from_str(&json.out).unwrap();
    insta::assert_json_snapshot!(answer);
    let yaml = run(&format!("{args} yaml"), &mesh());
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml.out).unwrap(), answer);
}

#[test]
fn changed_mesh_changes_the_answer() {
    let (app, web, notebook, postgres) = (
        "tenant-a/default/app-0",
        "mgmt/team-x/web-0:8080",
        "notebooks/lab/nb-0",
        "mgmt/team-x/svc/postgres-rw:5432",
    );
    let single = |rule: &str| vec![rule.to_owned()];
    assert_eq!(rules(app, web, &mesh()), (Some(0), single("Meshed")));
    let mesh_with = |cluster: &str, line: &str| {
        let name = format!("- name: {cluster}\n");
        mesh().replace(&name, &format!("{name}    {line}\n"))
    };
    for (change, code, rule) in [
        (mesh_with("tenant-a", "quarantine: true"), 1, "Quarantined"),
        (mesh_with("mgmt", "quarantine: true"), 1, "Quarantined"),
        (
            mesh_with("tenant-a", "isolationProfile: sandbox"),
            1,
            "NoGrantForMember",
        ),
        (mesh_with("tenant-a", "isolationProfile: standard"), 1, "Standard"),
        (mesh().replace("10.20.0.0/16, ", ""), 1, "NodeSkipped"),
        (
            mesh().replace("[10.20.0.0/16, 100.67.0.0/16]", "[10.244.0.0/15]"),
            1,
            "NetworksOverlap",
        ),
    ] {
        assert_eq!(rules(app, web, &change), (Some(code), single(rule)), "{change}");
    }
    assert_eq!(rules(notebook, postgres, &mesh()), (Some(0), single("Granted")));
    let quarantined = mesh_with("notebooks", "quarantine: true");
    assert_eq!(
        rules(notebook, postgres, &quarantined),
        (Some(1), vec!["Quarantined".to_owned(); 2])
    );
    let other_port = mesh().replace("port: 5432", "port: 9187");
    assert_eq!(rules(notebook, postgres, &other_port).1[0], "DestinationNotGranted");
}

#[test]
fn infrastructure_port_flag_changes_rule_and_policy() {
    let rule = |flags: &str| {
        let answer = run(
            &format!("explain tenant-a/w1 mgmt/h1:8132 {INPUT} -o json {flags}"),
            &mesh(),
        );
        let answer: Value = serde_json::from_str(&answer.out).unwrap_or_else(|_| panic!("{}", answer.err));
        // The second answer is for the WireGuard address of h1.
        answer["answers"][1]["rule"].as_str().unwrap().to_owned()
    };
    assert_eq!(rule(""), "WireguardAddress");
    assert_eq!(rule("--infrastructure-port 8132/TCP"), "InfrastructurePort");
    assert_eq!(rule("--infrastructure-port 8132/UDP"), "WireguardAddress");

    let plan = run(&format!("plan {INPUT} -o json --infrastructure-port 8132"), &mesh());
    let plan: Value = serde_json::from_str(&plan.out).unwrap();
    let policy = &plan["meshes"][0]["targets"][0]["policies"][0]["spec"];
    let ports = policy["infrastructurePorts"].as_array().unwrap();
    assert!(ports.contains(&json!({"port": 8132, "protocol": "TCP"})), "{ports:?}");

    let refused = run(&format!("plan {INPUT} --infrastructure-port konnectivity"), &mesh());
    assert!(
        refused.code != Some(0) && refused.err.contains("--infrastructure-port") && refused.err.contains("8132/TCP"),
        "{}",
        refused.err
    );
}

#[test]
fn wireguard_address_is_allowed_only_without_a_port() {
    let rules_to = |to: &str| rules("tenant-a/w1", to, &mesh()).1;
    // The first rule is for the node's InternalIP, which is outside allowedNetworks of mgmt, the second for its WireGuard address.
    // Without a port the connection can be a ping, which a node's WireGuard address answers.
    assert_eq!(rules_to("mgmt/h1:9100"), ["OutsideAllowedNetworks", "WireguardAddress"]);
    assert_eq!(rules_to("mgmt/h1"), ["OutsideAllowedNetworks", "Meshed"]);
}

#[test]
fn masquerading_on_a_kg_node_is_unknown() {
    const NOTE: &str = "kg does not prevent masquerading: if the CNI masquerades";
    let nodes = fs::read_to_string(fixtures().join("kilo/nodes-c2.json")).unwrap();
    let path_from = |nodes: &Value| {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("nodes.json");
        fs::write(&path, nodes.to_string()).unwrap();
        let given = format!(
            "-f kilo/mesh.yaml --cluster c1=kilo/nodes-c1.json --cluster c2={}",
            path.display()
        );
        let run = run(&format!("explain 10.102.0.5 10.101.4.9 {given} -o json"), "");
        let answer: Value = serde_json::from_str(&run.out).unwrap_or_else(|_| panic!("{}{}", run.out, run.err));
        let notes = answer["answers"][0]["notes"].as_array().unwrap();
        let has_note = notes.iter().any(|note| note.as_str().unwrap().starts_with(NOTE));
        (answer["answers"][0]["path"]["masqueraded"].clone(), has_note)
    };
    let mut nodes: Value = serde_json::from_str(&nodes).unwrap();
    assert_eq!(path_from(&nodes), (Value::Null, true));
    for mode in ["policy", "full"] {
        let agent = json!({"version": "1.0.0", "mode": mode}).to_string();
        nodes["items"][0]["metadata"]["annotations"]["kilo-clustermesh.io/agent"] = agent.into();
        assert_eq!(path_from(&nodes), (json!(false), false), "{mode}");
    }
}

#[test]
fn path_shows_which_objects_are_written() {
    let plan = run(&format!("plan {INPUT} -o json"), &mesh());
    let plan: Value = serde_json::from_str(&plan.out).unwrap();
    let folder = TempDir::new().unwrap();
    let mut flags = String::new();
    for target in plan["meshes"][0]["targets"].as_array().unwrap() {
        let name = target["cluster"].as_str().unwrap();
        // No files of `parked` are given, so nothing is planned into it.
        if name == "parked" {
            continue;
        }
        let items = ["peers", "policies"]
            .map(|key| target[key].as_array().unwrap().clone())
            .concat();
        let path = folder.path().join(format!("{name}.json"));
        fs::write(
            &path,
            json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string(),
        )
        .unwrap();
        flags.push_str(&format!(" --cluster {name}={}", path.display()));
    }
    let are_written = |flags: &str| {
        let args = format!("explain tenant-a/default/app-0 mgmt/team-x/web-0:80 {INPUT}{flags} -o json");
        let run = run(&args, &mesh());
        let answer: Value = serde_json::from_str(&run.out).unwrap();
        let path = &answer["answers"][0]["path"];
        [
            &path["out"]["written"],
            &path["back"]["written"],
            &path["policy"]["written"],
        ]
        .map(|value| value.as_bool().unwrap())
    };
    assert_eq!(are_written(""), [false; 3]);
    assert_eq!(are_written(&flags), [true; 3]);
}

#[test]
fn input_without_an_answer_exits_with_code_2() {
    for (from, to, message) in [
        (
            "app-0",
            "mgmt/team-x/web-0",
            "error: SRC \"app-0\": write CLUSTER/NAMESPACE/POD",
        ),
        ("tenant-a/w1:80", "mgmt/h1", "leave the port out"),
        ("tenant-a/w1", "mgmt/h1:http", "port \"http\" is not a number"),
        (
            "tenant-b/w1",
            "mgmt/h1",
            "no mesh has an entry \"tenant-b\"; there are mgmt, notebooks, parked, tenant-a",
        ),
        (
            "mgmt/team-x/svc/postgres-rw",
            "tenant-a/w1",
            "a Service opens no connection",
        ),
    ] {
        let run = explain(from, to);
        assert_eq!((run.code, &*run.out), (Some(2), ""), "{from} {to}");
        assert!(run.err.contains(message), "{}", run.err);
    }
    let usage = run("explain tenant-a/w1", "");
    assert_eq!(usage.code, Some(2), "{}", usage.err);
    let run = explain("tenant-a/default/web-9", "mgmt/team-x/postgres-rw");
    assert_eq!(run.code, Some(2));
    assert!(
        run.out.contains("cluster \"tenant-a\" has no Pod default/web-9"),
        "{}",
        run.out
    );
    let run = explain("tenant-a/w1", "mgmt/team-x/postgres-rw");
    assert!(
        run.out
            .contains("there is a Service of that name:\n    mgmt/team-x/svc/postgres-rw\n"),
        "{}",
        run.out
    );
}

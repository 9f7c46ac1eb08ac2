//! Runs the built program as `clustermeshctl plan` on files.

mod invalid_input;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use tempfile::TempDir;

struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.err);
        serde_json::from_str(&self.out).unwrap()
    }
}

/// Runs `clustermeshctl plan` in the folder of the fixtures, so that messages contain relative paths.
fn plan_with_stdin(args: &str, stdin: &str) -> Run {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut child = Command::new(env!("CARGO_BIN_EXE_clustermeshctl"))
        .arg("plan")
        .args(args.split_whitespace())
        .current_dir(fixtures)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The write may fail, because a run that ends early does not read its input.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = child.wait_with_output().unwrap();
    Run {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn plan(args: &str) -> Run {
    plan_with_stdin(args, "")
}

const AGENTS: &str = "-f agents/mesh.yaml --cluster mgmt=agents/mgmt.yaml --cluster tenant-a=agents/tenant-a";
const KILO: &str = "-f kilo/mesh.yaml --cluster c1=kilo/nodes-c1.json --cluster c2=kilo/nodes-c2.json";

/// A folder with one file for each member. The file contains the planned objects, as if the controller had written them.
struct Applied {
    folder: TempDir,
}

impl Applied {
    fn new(plan: &Value) -> Self {
        let applied = Self {
            folder: TempDir::new().unwrap(),
        };
        for target in plan["meshes"][0]["targets"].as_array().unwrap() {
            let objects =
                ["peers", "policies", "accesses", "services"].map(|key| target[key].as_array().unwrap().clone());
            applied.write(target["cluster"].as_str().unwrap(), &objects.concat());
        }
        applied
    }

    fn path(&self, cluster: &str) -> PathBuf {
        self.folder.path().join(format!("{cluster}.json"))
    }

    fn write(&self, cluster: &str, items: &[Value]) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        fs::write(self.path(cluster), list.to_string()).unwrap();
    }

    fn edit(&self, cluster: &str, change: impl Fn(&mut Value)) {
        let mut list: Value = serde_json::from_str(&fs::read_to_string(self.path(cluster)).unwrap()).unwrap();
        list["items"].as_array_mut().unwrap().iter_mut().for_each(change);
        fs::write(self.path(cluster), list.to_string()).unwrap();
    }

    fn retain(&self, cluster: &str, keep: impl Fn(&Value) -> bool) {
        let mut list: Value = serde_json::from_str(&fs::read_to_string(self.path(cluster)).unwrap()).unwrap();
        list["items"].as_array_mut().unwrap().retain(keep);
        fs::write(self.path(cluster), list.to_string()).unwrap();
    }

    /// The flags that add these files to the files of the fixtures.
    fn flags(&self, clusters: &[&str]) -> String {
        let flags = clusters
            .iter()
            .map(|name| format!(" --cluster {name}={}", self.path(name).display()));
        flags.collect()
    }
}

fn changes(plan: &Value, cluster: &str) -> Value {
    let targets = plan["meshes"][0]["targets"].as_array().unwrap();
    targets.iter().find(|target| target["cluster"] == cluster).unwrap()["changes"].clone()
}

fn expected_change(action: &str, kind: &str, name: &str, fields: &[&str]) -> Value {
    json!({"action": action, "kind": kind, "name": name, "fields": fields})
}

#[test]
fn plan_table_shows_changes_and_skipped_nodes() {
    let run = plan(AGENTS);
    assert_eq!(
        run.err,
        "note: ignored, because a plan does not need them: 1 ConfigMap\n"
    );
    insta::assert_snapshot!(run.out);
    assert_eq!(run.code, Some(0));
}

#[test]
fn plan_json_has_whole_objects_and_changes() {
    insta::assert_json_snapshot!(plan(&format!("{AGENTS} --hub-id hub-1 -o json")).json());
}

#[test]
fn plan_yaml_equals_json() {
    let yaml = plan(&format!("{AGENTS} -o yaml"));
    let read: Value = serde_saphyr::from_str(&yaml.out).unwrap();
    assert_eq!(read, plan(&format!("{AGENTS} -o json")).json());
}

#[test]
fn kg_clusters_are_planned_by_location_without_policies() {
    insta::assert_snapshot!(plan(KILO).out);
}

#[test]
fn foreign_peers_keep_their_keys_and_are_not_changed() {
    let run = plan(&format!("{KILO} --cluster c2=kilo/kgctl-peers-c2.yaml -o json"));
    let plan = run.json();
    assert_eq!(changes(&plan, "c2"), json!([]));
    let skipped = &plan["meshes"][0]["clusters"][0]["skipped"];
    let reasons: Vec<&Value> = skipped
        .as_array()
        .unwrap()
        .iter()
        .map(|skipped| &skipped["reason"])
        .collect();
    assert_eq!(reasons, ["PublicKeyDuplicate"; 2], "{skipped}");
}

#[test]
fn applied_plan_leaves_nothing_to_change() {
    for (fixture, clusters) in [(AGENTS, ["mgmt", "tenant-a"]), (KILO, ["c1", "c2"])] {
        let first = plan(&format!("{fixture} -o json")).json();
        let applied = Applied::new(&first);
        let args = format!("{fixture}{}", applied.flags(&clusters));
        let table = plan(&format!("{args} --exit-code"));
        assert!(table.out.ends_with("\nNothing would change.\n"), "{}", table.out);
        assert_eq!(table.code, Some(0));
        let second = plan(&format!("{args} -o json")).json();
        for target in 0..clusters.len() {
            let objects = |plan: &Value, key: &str| plan["meshes"][0]["targets"][target][key].clone();
            for key in ["peers", "policies", "accesses", "services"] {
                assert_eq!(
                    objects(&second, key),
                    objects(&first, key),
                    "{}: {key}",
                    clusters[target]
                );
            }
        }
    }
}

#[test]
fn unlisted_kinds_cause_no_changes() {
    let applied = Applied::new(&plan(&format!("{AGENTS} -o json")).json());
    // The user listed no peerpolicies.
    for cluster in ["mgmt", "tenant-a"] {
        applied.retain(cluster, |object| object["kind"] != "PeerPolicy");
    }
    let run = plan(&format!("{AGENTS}{} --exit-code", applied.flags(&["mgmt", "tenant-a"])));
    assert_eq!(run.code, Some(0), "{}", run.out);
    // The user listed neither services nor endpointslices of the member that has the original of the mirrored Service.
    let nodes = applied.folder.path().join("nodes.yaml");
    let mgmt = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/agents/mgmt.yaml")).unwrap();
    fs::write(&nodes, mgmt.split_once("- apiVersion: v1\n  kind: Service").unwrap().0).unwrap();
    let run = plan(&format!(
        "-f agents/mesh.yaml --cluster mgmt={} --cluster tenant-a=agents/tenant-a{} --exit-code",
        nodes.display(),
        applied.flags(&["mgmt", "tenant-a"])
    ));
    assert_eq!(run.code, Some(0), "{}", run.out);
    assert_eq!(
        run.err,
        "note: the input for cluster \"mgmt\" has no EndpointSlice and no PeerPolicy and no Service: they were probably not listed, \
         so their absence causes no change\n\
         note: the input for cluster \"tenant-a\" has no PeerPolicy: they were probably not listed, so their absence causes no change\n"
    );
    assert!(run.out.contains("Unresolved"), "{}", run.out);
}

#[test]
fn missing_cluster_causes_no_deletes() {
    let applied = Applied::new(&plan(&format!("{AGENTS} --hub-id h -o json")).json());
    let run = plan(&format!(
        "-f agents/mesh.yaml --cluster mgmt=agents/mgmt.yaml{} --exit-code",
        applied.flags(&["mgmt"])
    ));
    assert_eq!(run.code, Some(0), "{}", run.out);
    insta::assert_snapshot!(run.out);
}

#[test]
fn removed_node_deletes_its_peer() {
    let applied = Applied::new(&plan(&format!("{AGENTS} -o json")).json());
    let no_nodes = applied.folder.path().join("none.yaml");
    fs::write(&no_nodes, "kind: NodeList\napiVersion: v1\nitems: []\n").unwrap();
    let plan = plan(&format!(
        "-f agents/mesh.yaml --cluster mgmt=agents/mgmt.yaml --cluster tenant-a={}{} -o json",
        no_nodes.display(),
        applied.flags(&["mgmt"]),
    ));
    let deleted = expected_change("delete", "Peer", "prod--tenant-a--w1", &[]);
    assert_eq!(changes(&plan.json(), "mgmt"), json!([deleted]));
}

#[test]
fn predecessor_peers_are_adopted_by_label_changes() {
    let applied = Applied::new(&plan(&format!("{KILO} -o json")).json());
    for cluster in ["c1", "c2"] {
        applied.edit(cluster, |peer| {
            let labels = peer["metadata"]["labels"].as_object_mut().unwrap();
            labels.retain(|key, _| key.ends_with("/mesh") || key.ends_with("/source-cluster"));
            assert_eq!(labels.len(), 2);
        });
    }
    let run = plan(&format!("{KILO}{} -o json", applied.flags(&["c1", "c2"])));
    let label_updates = |names: &[&str]| -> Value {
        names
            .iter()
            .map(|name| expected_change("update", "Peer", name, &["metadata.labels"]))
            .collect()
    };
    assert_eq!(
        changes(&run.json(), "c1"),
        label_updates(&["pair--c2--c2n1", "pair--c2--c2n2", "pair--c2--c2n3"])
    );
    assert_eq!(
        changes(&run.json(), "c2"),
        label_updates(&["pair--c1--c1n1", "pair--c1--c1n3"])
    );
    insta::assert_snapshot!(plan(&format!("{KILO}{}", applied.flags(&["c1", "c2"]))).out);
}

#[test]
fn changed_objects_are_shown_with_their_differences() {
    let applied = Applied::new(&plan(&format!("{AGENTS} -o json")).json());
    applied.edit("tenant-a", |object| {
        match (object["kind"].as_str(), object["metadata"]["name"].as_str()) {
            (Some("Peer"), Some("prod--mgmt--h1")) => {
                object["spec"]["allowedIPs"] = json!(["10.244.0.0/24", "10.7.0.0/16"]);
                object["spec"]["endpoint"]["dnsOrIP"] = json!({"ip": "203.0.113.99"});
                object["metadata"]["annotations"] = json!({"note": "mine"});
            }
            (Some("Peer"), Some("prod--mgmt--h2")) => object["spec"]["allowedIPs"] = json!(["10.244.1.5/24"]),
            (Some("PeerPolicy"), _) => object["spec"]["sources"] = json!(["10.244.0.0/16"]),
            (Some("EndpointSlice"), _) => object["endpoints"][0]["addresses"] = json!(["10.244.1.77"]),
            _ => {}
        }
    });
    let run = plan(&format!("{AGENTS}{}", applied.flags(&["mgmt", "tenant-a"])));
    insta::assert_snapshot!(run.out);
    let json = plan(&format!("{AGENTS}{} -o json", applied.flags(&["mgmt", "tenant-a"]))).json();
    let peers = &json["meshes"][0]["targets"][1]["peers"];
    let candidates = "203.0.113.11:51820,192.168.1.11:51820";
    let annotations = json!({"kilo-clustermesh.io/endpoints": candidates, "note": "mine"});
    assert_eq!(peers[0]["metadata"]["annotations"], annotations);
}

#[test]
fn exit_code_distinguishes_changes_from_errors() {
    let code = |args: &str| plan(args).code;
    assert_eq!(code(AGENTS), Some(0));
    assert_eq!(code(&format!("{AGENTS} --exit-code")), Some(2));
    assert_eq!(code("-f agents/none.yaml --exit-code"), Some(1));
    assert_eq!(code("--exit-code"), Some(1));
    assert_eq!(code(&format!("{AGENTS} --no-such-flag")), Some(1));
    assert_eq!(code("--help"), Some(0));
}

#[test]
fn meshes_in_several_documents_share_a_cluster() {
    let lab = "apiVersion: kilo.squat.ai/v1alpha1\nkind: ClusterMesh\nmetadata: {name: lab, namespace: meshes}\nspec:\n  clusters:\n  \
                  - name: hub\n    local: true\n    allowedNetworks: [10.244.0.0/16, 100.66.0.0/16, 10.96.0.0/12]\n  \
                  - name: tenant-b\n    kubeconfigSecretRef: {name: b}\n    allowedNetworks: [10.30.0.0/16]\n---\n";
    let prod = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/agents/mesh.yaml")).unwrap();
    let run = plan_with_stdin(
        "-f - --cluster mgmt=agents/mgmt.yaml --cluster tenant-a=agents/tenant-a -o json",
        &format!("{lab}{prod}"),
    );
    let both = run.json();
    let names: Vec<&Value> = both["meshes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mesh| &mesh["name"])
        .collect();
    assert_eq!(names, ["lab", "prod"]);
    // Only `tenant-b` has no files: those given for `mgmt` are also used for `hub`, because both entries are the local cluster.
    assert_eq!(
        both["meshes"][0]["conditions"][0]["message"],
        "cluster \"tenant-b\": not given; add --cluster tenant-b=FILE_OR_DIR"
    );
    let alone = plan(&format!("{AGENTS} -o json")).json();
    assert_eq!(both["meshes"][1], alone["meshes"][0]);
    let twice = plan_with_stdin(
        "-f - --cluster mgmt=agents/mgmt.yaml --cluster hub=agents/mgmt.yaml",
        &format!("{lab}{prod}"),
    );
    let refusal = "error: --cluster hub and --cluster mgmt are the same cluster (the local cluster): give one of them";
    assert_eq!(twice.err.lines().last(), Some(refusal));
}

#[test]
fn objects_of_a_missing_mesh_are_left_unchanged() {
    let applied = Applied::new(&plan(&format!("{AGENTS} --hub-id h -o json")).json());
    applied.edit("mgmt", |object| {
        object["metadata"]["name"] = json!(format!("other--{}", object["kind"].as_str().unwrap().to_lowercase()));
        object["metadata"]["labels"]["kilo-clustermesh.io/mesh"] = json!("other");
    });
    let run = plan(&format!("{AGENTS}{} --hub-id h -o json", applied.flags(&["mgmt"])));
    assert_eq!(
        run.err.lines().last(),
        Some(
            "note: 2 object(s) in cluster \"mgmt\" belong to ClusterMesh meshes/other, which is not given: they are left unchanged"
        )
    );
    // The Peer of the missing mesh has the key of Node w1 and keeps it, so `prod` creates only the policy.
    let created = expected_change("create", "PeerPolicy", "prod--tenant-a", &[]);
    assert_eq!(changes(&run.json(), "mgmt"), json!([created]));
    let table = plan(&format!("{AGENTS}{} --hub-id h", applied.flags(&["mgmt"])));
    assert!(table.out.contains("Into mgmt: 1 to create\n"), "{}", table.out);
    assert!(table.out.contains("other--peer there"), "{}", table.out);
    assert!(table.out.ends_with("Total: 6 to create.\n"), "{}", table.out);
}

#[test]
fn hub_id_defaults_to_kube_system_uid_then_to_peer_labels() {
    let hub = |flags: &str| {
        let plan = plan(&format!("{AGENTS}{flags} -o json")).json();
        let labels = &plan["meshes"][0]["targets"][0]["policies"][0]["metadata"]["labels"];
        labels["kilo-clustermesh.io/hub"].as_str().unwrap().to_owned()
    };
    assert_eq!(hub(""), "unknown");
    let applied = Applied::new(&plan(&format!("{AGENTS} --hub-id labels -o json")).json());
    let existing = applied.flags(&["mgmt", "tenant-a"]);
    assert_eq!(hub(&existing), "labels");
    let system = applied.folder.path().join("system.yaml");
    fs::write(
        &system,
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: kube-system, uid: 11-22}\n",
    )
    .unwrap();
    let system = format!("{existing} --cluster mgmt={}", system.display());
    assert_eq!(hub(&system), "11-22");
    assert_eq!(hub(&format!("{system} --hub-id flag")), "flag");
    // With this id, the existing objects belong to a different hub, so no step changes or deletes them.
    let foreign = plan(&format!("{AGENTS}{existing} --hub-id another -o json")).json();
    assert_eq!(
        changes(&foreign, "mgmt")
            .as_array()
            .unwrap()
            .iter()
            .filter(|change| change["action"] != "create")
            .count(),
        0
    );
}

#[test]
fn sandbox_grants_and_their_changes_are_shown() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mesh = fs::read_to_string(fixtures.join("agents/mesh.yaml")).unwrap();
    let sandbox = mesh.replace(
        "    allowedNetworks: [10.20.0.0/16, 100.67.0.0/16]\n",
        "    isolationProfile: sandbox\n    allowedNetworks: [100.67.0.0/16]\n",
    );
    let clusters =
        "-f - --cluster mgmt=agents/mgmt.yaml --cluster mgmt=explain/gateways.yaml --cluster tenant-a=agents/tenant-a";
    let run = plan_with_stdin(clusters, &sandbox);
    let granted = "        from 100.67.0.0/16
        nodes w1, w2
        through gateways at TCP/24040 -> Service team-x/postgres-rw sql
";
    assert!(run.out.contains(granted), "{}{}", run.out, run.err);

    let applied = Applied::new(&plan_with_stdin(&format!("{clusters} -o json"), &sandbox).json());
    let with_all_ports = sandbox.replace("      ports: [{port: 5432}]\n", "");
    let run = plan_with_stdin(
        &format!("{clusters}{}", applied.flags(&["mgmt", "tenant-a"])),
        &with_all_ports,
    );
    let change = "        through gateways at TCP/24040 -> Service team-x/postgres-rw sql -> through gateways at
          TCP/24040 -> Service team-x/postgres-rw sql, TCP/26929 -> Service team-x/postgres-rw
          metrics
";
    assert!(run.out.contains(change), "{}{}", run.out, run.err);
    let peer = "        endpoint 192.168.1.11:51821, keepalive 25 s
        allowedIPs 100.66.255.1/32
";
    assert!(run.out.contains(peer), "{}{}", run.out, run.err);
}

// threat: terminal-injection
#[test]
fn text_from_clusters_is_escaped_on_the_terminal() {
    let mesh = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/agents/mesh.yaml")).unwrap();
    let hostile = json!({"apiVersion": "v1", "kind": "E\u{1b}[2J\u{9b}31m\u{202e}", "metadata": {"name": "x"}});
    let args = "-f - --cluster mgmt=agents/mgmt.yaml --cluster tenant-a=agents/tenant-a";
    // YAML does not allow unescaped C1 control characters.
    let hostile = hostile.to_string().replace('\u{9b}', "\\u009b");
    let run = plan_with_stdin(args, &format!("{mesh}\n---\n{hostile}\n"));
    let note = "note: ignored, because a plan does not need them: 1 ConfigMap, 1 E\\u001b[2J\\u009b31m\\u202e";
    assert!(run.err.lines().any(|line| line == note), "{:?}", run.err);
    assert_eq!(run.out, plan(AGENTS).out);
}

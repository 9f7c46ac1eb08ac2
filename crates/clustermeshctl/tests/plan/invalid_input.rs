//! Tests the errors for invalid input. An error about an object names the file, the line, the object and the field.

use super::*;

#[test]
fn malformed_object_is_reported_with_file_line_and_field() {
    let folder = TempDir::new().unwrap();
    fs::write(
        folder.path().join("a.yaml"),
        "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Node\n  metadata: {name: n1}\n  spec:\n    \
         podCIDRs: 10.0.0.0/24\n",
    )
    .unwrap();
    fs::write(
        folder.path().join("b.json"),
        "{\"apiVersion\": \"kilo.squat.ai/v1alpha1\", \"kind\": \"Peer\",\n \"metadata\": {\"name\": \"p\"},\n \
         \"spec\": {\"allowedIPs\": []}}",
    )
    .unwrap();
    let run = plan(&format!(
        "-f agents/mesh.yaml --cluster mgmt={}",
        folder.path().display()
    ));
    let path = |name: &str| folder.path().join(name).display().to_string();
    assert_eq!(
        run.err,
        format!(
            "error: {}:8: Node n1: spec.podCIDRs: invalid type: string \"10.0.0.0/24\", expected a sequence: \
             correct it, or save the object again; `kubectl explain node.spec.podCIDRs` describes the field\n\
             error: {}:3: Peer p: spec: missing field `publicKey`: \
             correct it, or save the object again; `kubectl explain peer.spec` describes the field\n",
            path("a.yaml"),
            path("b.json")
        )
    );
    assert_eq!((run.code, &*run.out), (Some(1), ""));
}

#[test]
fn wrong_field_is_reported_with_its_document() {
    let object = |kind: &str, name: &str, spec: &str| {
        format!("apiVersion: v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
    };
    let documents = [
        object("Node", "n1", "{}"),
        object("Node", "n2", "{}"),
        object("Node", "n3", "\n  taints:\n  - key: a\n    effect: [NoSchedule]"),
        object("Node", "n4", "{unschedulable: 1}"),
        "kind: 7\n".to_owned(),
    ];
    let run = plan_with_stdin("-f agents/mesh.yaml --cluster mgmt=-", &documents[..4].join("---\n"));
    assert_eq!(
        run.err,
        "error: -:17 (document 3): Node n3: spec.taints[0].effect: invalid type: sequence, expected a string: correct it, or save the \
         object again; `kubectl explain node.spec.taints.effect` describes the field\n\
         error: -:22 (document 4): Node n4: spec.unschedulable: invalid type: integer `1`, expected a boolean: correct it, or save \
         the object again; `kubectl explain node.spec.unschedulable` describes the field\n"
    );
    let run = plan_with_stdin("-f agents/mesh.yaml --cluster mgmt=-", &documents[3..].join("---\n"));
    assert_eq!(
        run.err,
        "error: -:6 (document 2): is not a Kubernetes object: kind: invalid type: integer `7`, expected a string: save the objects \
         with `kubectl get KIND -A -o yaml`\n"
    );
}

#[test]
fn invalid_mesh_is_reported_with_all_fields_and_lines() {
    let mesh = "apiVersion: kilo.squat.ai/v1alpha1\nkind: ClusterMesh\nmetadata: {name: m, namespace: x}\nspec:\n  clusters:\n  \
                - name: mgmt\n    local: true\n    allowedNetworks:\n    - 10.0.0.0/33\n  \
                - name: A\n    kubeconfigSecretRef: {name: s}\n    allowedNetworks: [10.2.0.0/16]\n";
    let run = plan_with_stdin("-f -", mesh);
    assert_eq!(run.code, Some(1));
    insta::assert_snapshot!(run.err);
}

#[test]
fn misspelt_mesh_field_is_refused() {
    let mesh = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/agents/mesh.yaml")).unwrap();
    let mesh = mesh.replace("    egress:\n", "    isolationprofile: sandbox\n    egress:\n");
    let run = plan_with_stdin("-f -", &mesh);
    assert_eq!(
        run.err,
        "error: -:16: ClusterMesh meshes/prod: spec.clusters[1].isolationprofile: a ClusterMesh has no such field: remove it or \
         correct its name; `kubectl explain clustermesh.spec --recursive` lists the fields\n"
    );
}

#[test]
fn invalid_or_duplicate_input_is_refused() {
    let err = |args: &str, stdin: &str| {
        let run = plan_with_stdin(args, stdin);
        assert_eq!((run.code, &*run.out), (Some(1), ""));
        run.err
    };
    let refused = [
        err("-f -", "a: [1\nb: 2\n"),
        err("-f -", "- 1\n"),
        err("-f -", "kind: Secret\napiVersion: v1\n"),
        err("-f - --cluster mgmt=-", "kind: Secret\napiVersion: v1\n"),
        err("-f agents/mesh.yaml -f agents", ""),
        err("-f agents/mesh.yaml --cluster mgnt=agents/mgmt.yaml", ""),
        err(
            "-f agents/mesh.yaml --cluster mgmt=agents/mgmt.yaml --cluster mgmt=agents/mgmt.yaml",
            "",
        ),
        err("-f agents/mesh.yaml --cluster mgmt=nowhere", ""),
        err("-f agents/mesh.yaml --cluster mgmt", ""),
    ];
    insta::assert_snapshot!(refused.join("\n"));
}

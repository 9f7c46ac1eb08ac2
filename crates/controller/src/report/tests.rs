//! Tests the report of a mesh.

use super::*;

fn condition(kind: &'static str, status: bool) -> Condition {
    Condition {
        kind,
        status,
        reason: "AnyReason",
        message: String::new(),
    }
}

#[test]
fn condition_without_change_keeps_its_transition_time() {
    let time = |second| meta::Time(k8s_openapi::jiff::Timestamp::from_second(second).expect("a time"));
    let report = |conditions| Report::with(conditions, vec![]);
    let first = report(vec![condition("Ready", false), condition("Degraded", true)]).status(None, &time(1));
    let second = report(vec![condition("Ready", true), condition("Degraded", true)]).status(Some(&first), &time(2));
    let times: Vec<_> = second
        .conditions
        .iter()
        .map(|c| (&*c.type_, &*c.status, c.last_transition_time.clone()))
        .collect();
    assert_eq!(times, [("Ready", "True", time(2)), ("Degraded", "True", time(1))]);
}

#[test]
fn problem_keeps_its_time_while_only_its_message_changes() {
    let time = |second| meta::Time(k8s_openapi::jiff::Timestamp::from_second(second).expect("a time"));
    let status = |causes: Vec<Cause>, before: Option<&ClusterMeshStatus>, second| {
        let report = Report {
            causes,
            ..Report::with(vec![], vec![])
        };
        report.status(before, &time(second))
    };
    let cause = |cluster, message: &str| Cause::of_member("Degraded", "AddressShared", cluster, message.to_owned());
    let first = status(vec![cause("a", "1"), cause("b", "1")], None, 1);
    let second = status(vec![cause("a", "2"), cause("a", "1"), cause("c", "1")], Some(&first), 2);
    let third = status(vec![cause("a", "2"), cause("b", "1")], Some(&second), 3);
    let times = |status: &ClusterMeshStatus| -> Vec<_> {
        let rows = status.problems.iter();
        rows.map(|row| (row.cluster.clone().unwrap_or_default(), row.since.0.as_second()))
            .collect()
    };
    let want =
        |rows: &[(&str, i64)]| -> Vec<_> { rows.iter().map(|(name, since)| ((*name).to_owned(), *since)).collect() };
    assert_eq!(times(&second), want(&[("a", 1), ("a", 1), ("c", 2)]));
    // "b" had no such problem meanwhile.
    assert_eq!(times(&third), want(&[("a", 1), ("b", 3)]));
}

/// After a restart, the status is the only source of these values while the member does not answer.
#[test]
fn row_of_a_member_not_observed_yet_keeps_its_values() {
    let row = serde_json::json!({
        "name": "a", "uid": "u", "lastSync": "2026-01-01T00:00:00Z", "kubernetesVersion": "v1.36.3", "reachable": false,
        "agents": {"total": 2, "full": 2},
    });
    let object: ClusterMesh = serde_json::from_value(serde_json::json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh", "metadata": {"name": "m", "namespace": "ns"},
        "spec": {"clusters": []}, "status": {"clusters": [row]},
    }))
    .expect("a ClusterMesh");
    let (plan, none, details) = (MeshPlan::default(), BTreeMap::new(), BTreeMap::new());
    let mesh = Mesh {
        id: clustermesh_core::mesh::MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        },
        created: 0,
        paused: false,
        deleting: false,
        adopt_hub: None,
        clusters: vec![],
        accepted: BTreeMap::new(),
    };
    let input = ReportInput {
        object: &object,
        mesh: &mesh,
        plan: &plan,
        refused: None,
        warnings: &[],
        unwritten: &none,
        removed: &[],
        given_up: &[],
        outstanding: &BTreeMap::new(),
        details: &details,
        broken: &[],
        pending: &BTreeSet::new(),
        now: &meta::Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
    };
    let before = object.status.clone().expect("a status").clusters.remove(0);
    assert_eq!(cluster_row(&input, "a"), before);
}

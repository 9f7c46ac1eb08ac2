//! Tests the report of `status` and its table.

use clustermesh_core::status::Cause;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{
    fixture::{NOW, add_problem, broken, condition, healthy, make_unreachable, snapshot, time},
    live::{LiveMember, LiveMesh},
    replicas::Replicas,
    report::{Report, Severity, Share},
    snapshot::{Leader, Snapshot},
    table,
};

fn render(snapshot: &Snapshot, all: bool) -> String {
    table::render(&Report::new(snapshot, None), time(NOW), all)
}

/// 50 meshes of the hub and one tenant each.
fn tenants() -> Vec<Value> {
    (1..=50)
        .map(|n| healthy(&format!("team-{n:02}"), &[&format!("tenant-{n:02}")]))
        .collect()
}

#[test]
fn healthy_meshes_are_one_line_each() {
    let one = render(&snapshot([healthy("acme", &["tenant-a"])]), false);
    let two = render(
        &snapshot([healthy("acme", &["tenant-a"]), healthy("bolt", &["x", "y"])]),
        false,
    );
    let fifty = render(&snapshot(tenants()), false);
    insta::assert_snapshot!(format!("{one}\n{two}\n{fifty}"));
}

/// The table shows the object, the start and the remedy of each problem.
#[test]
fn broken_mesh_shows_object_since_and_remedy() {
    let snapshot = snapshot([broken()]);
    let (short, all) = (render(&snapshot, false), render(&snapshot, true));
    assert!(short.lines().count() <= 10, "{short}");
    insta::assert_snapshot!(format!("{short}\n--all\n{all}"));
}

#[test]
fn outage_of_many_members_is_one_item() {
    let mut meshes = tenants();
    for (n, mesh) in (1..).zip(&mut meshes).take(40) {
        make_unreachable(
            mesh,
            &format!("tenant-{n:02}"),
            &format!("2026-01-10T11:{:02}:00Z", 59 - n),
        );
    }
    for (n, mesh) in (1..).zip(&mut meshes).skip(38) {
        let tenant = format!("tenant-{n:02}");
        let message = format!("9 of 9 tunnels from nodes of cluster \"mgmt\" to cluster {tenant:?} are down");
        add_problem(
            mesh,
            ("Degraded", "TunnelsDown"),
            ["mgmt", &tenant],
            "2026-01-10T11:50:00Z",
            &message,
        );
    }
    let message = "cluster \"tenant-50\": 403";
    add_problem(
        &mut meshes[49],
        ("Ready", "WriteFailed"),
        ["tenant-50", ""],
        "2026-01-09T11:50:00Z",
        message,
    );
    for mesh in &mut meshes[30..] {
        let message = "gateway a/b is down";
        add_problem(
            mesh,
            ("EgressResolved", "Unresolved"),
            ["mgmt", ""],
            "2026-01-09T11:50:00Z",
            message,
        );
    }
    for mesh in &mut meshes[..3] {
        let since = "2026-01-10T11:50:00Z";
        add_problem(
            mesh,
            ("PolicyEnforced", "NoAgent"),
            ["mgmt", ""],
            since,
            "kg runs without wg-agent",
        );
        add_problem(
            mesh,
            ("Degraded", "NoAnchor"),
            ["mgmt", ""],
            since,
            "no node can be the anchor",
        );
    }
    let text = render(&snapshot(meshes), false);
    assert!(text.lines().count() <= 10, "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn status_that_nobody_updates_is_a_problem() {
    let mut never = healthy("acme", &["tenant-a"]);
    never["status"] = json!({});
    let mut late = healthy("bolt", &["tenant-b"]);
    late["metadata"]["generation"] = json!(3);
    let managed = |time: &str, subresource: Option<&str>| json!({"manager": "m", "operation": "Update", "subresource": subresource, "time": time});
    late["metadata"]["managedFields"] = json!([managed("2026-01-10T11:00:00Z", None), managed(NOW, Some("status"))]);
    // The controller may need some seconds to report a change.
    let mut new = late.clone();
    new["metadata"]["namespace"] = json!("cold");
    new["metadata"]["managedFields"] = json!([managed("2026-01-10T11:59:50Z", None)]);
    let mut hub = snapshot([never, late, new]);
    hub.controller = Some(Leader {
        is_alive: false,
        renewed: Some(time("2026-01-10T08:00:00Z")),
        ..hub.controller.unwrap()
    });
    insta::assert_snapshot!(render(&hub, true));
    hub.controller = Some(Leader {
        holder: None,
        renewed: None,
        is_alive: false,
    });
    assert!(render(&hub, false).contains("DOWN       NoController: no replica holds the controller's Lease"));
    // Without the right to read the Lease, the output does not mention it.
    hub.controller = None;
    assert!(!render(&hub, true).contains("Lease"));
}

/// An older controller lists no problems, and a newer one may have further conditions.
#[test]
fn condition_without_listed_problem_is_shown_itself() {
    let mut old = healthy("acme", &["tenant-a"]);
    let since = "2026-01-10T10:00:00Z";
    old["status"]["conditions"] = json!([
        condition("Ready", "False", "MemberStale", since),
        condition("NetworksOverlap", "False", "NoOverlap", since),
        condition("Degraded", "True", "NodesSkipped", since),
        condition("PolicyEnforced", "False", "NoAgent", since),
    ]);
    let mut new = broken();
    new["metadata"]["namespace"] = json!("bolt");
    let conditions = new["status"]["conditions"].as_array_mut().unwrap();
    conditions.push(condition("VersionsCompatible", "False", "KubernetesTooOld", since));
    let report = Report::new(&snapshot([old, new]), None);
    let rows = |mesh: &str| -> Vec<(Severity, &str)> {
        let rows = report.problems.iter().filter(|row| row.mesh.as_deref() == Some(mesh));
        rows.map(|row| (row.severity, &*row.reason)).collect()
    };
    let old = [
        (Severity::Down, "MemberStale"),
        (Severity::Open, "NoAgent"),
        (Severity::Partly, "NodesSkipped"),
    ];
    assert_eq!(rows("acme/prod"), old);
    assert!(rows("bolt/prod").contains(&(Severity::Partly, "KubernetesTooOld")));
    assert_eq!(
        rows("bolt/prod")
            .iter()
            .filter(|(_, reason)| *reason == "MemberStale")
            .count(),
        1
    );
}

#[test]
fn pause_quarantine_and_old_agents_are_healthy_notes() {
    let mut mesh = healthy("acme", &["tenant-a"]);
    let since = "2026-01-10T10:00:00Z";
    add_problem(
        &mut mesh,
        ("Degraded", "Quarantined"),
        ["tenant-a", ""],
        since,
        "cluster \"tenant-a\" is in quarantine",
    );
    let conditions = mesh["status"]["conditions"].as_array_mut().unwrap();
    conditions.push(condition("Paused", "True", "Paused", since));
    mesh["status"]["clusters"][1]["agents"]["outdated"] = json!(2);
    let report = Report::new(&snapshot([mesh]), None);
    assert!(report.healthy);
    insta::assert_snapshot!(table::render(&report, time(NOW), false));
}

#[test]
fn live_state_replaces_what_the_controller_reported() {
    let mut mesh = broken();
    make_unreachable(&mut mesh, "tenant-c", "2026-01-10T11:00:00Z");
    let mut hub = snapshot([mesh]);
    hub.controller = Some(Leader {
        is_alive: false,
        ..hub.controller.unwrap()
    });
    let pod = |name: &str, status: Value| json!({"metadata": {"name": name}, "status": status});
    let ready = |status: &str| json!([{"type": "Ready", "status": status}]);
    let waiting = json!([{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 9, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]);
    let pods: Vec<Pod> = [
        pod("controller-0", json!({"conditions": ready("True")})),
        pod(
            "controller-1",
            json!({"conditions": ready("False"), "containerStatuses": waiting}),
        ),
    ]
    .map(|pod| serde_json::from_value(pod).unwrap())
    .into();
    hub.replicas = Some(Replicas::new(&pods));
    let cause =
        |reason, cluster: &str, message: &str| Cause::of_member("Degraded", reason, cluster, message.to_owned());
    let member = |answers, peers: (i64, i64)| LiveMember {
        answers,
        nodes: Share { working: 3, total: 3 },
        peers: Share {
            working: peers.0,
            total: peers.1,
        },
    };
    let live = LiveMesh {
        causes: vec![
            // The controller reported tenant-b as MemberStale, so the start of this problem is known. It also reported tenant-c
            // as MemberStale, but tenant-c answers now, so no cause here is about it.
            Cause::of_member(
                "Ready",
                "MemberUnreachable",
                "tenant-b",
                "cluster \"tenant-b\": Unauthorized (401)".to_owned(),
            ),
            Cause {
                to: Some("tenant-b".to_owned()),
                ..cause("TunnelsDown", "mgmt", "3 of 9 tunnels are down")
            },
            cause("ObjectsDiffer", "tenant-a", "1 object(s) in it are not as planned"),
        ],
        members: [
            ("mgmt".to_owned(), member(true, (9, 9))),
            ("tenant-a".to_owned(), member(true, (8, 9))),
            ("tenant-b".to_owned(), member(false, (0, 0))),
        ]
        .into(),
    };
    let live = [("acme/prod".to_owned(), live)].into();
    let report = Report::new(&hub, Some(&live));
    let short = table::render(&report, time(NOW), false);
    assert!(short.lines().count() <= 10, "{short}");
    let reasons: Vec<&str> = report.problems.iter().map(|row| &*row.reason).collect();
    // NodesSkipped is not found again, and `--live` always drops Converging. NoAgent and Unresolved stay as the controller
    // reported them.
    let want = [
        "NoController",
        "MemberStale",
        "MemberUnreachable",
        "NoAgent",
        "TunnelsDown",
        "Unresolved",
        "ObjectsDiffer",
        "AgentsOutdated",
    ];
    assert_eq!(reasons, want);
    insta::assert_snapshot!(format!("{short}\n--all\n{}", table::render(&report, time(NOW), true)));
}

#[test]
fn refused_mesh_is_not_compared_with_its_plan() {
    let mut mesh = healthy("acme", &["tenant-a"]);
    let message = "no --hub-namespace names this namespace";
    add_problem(&mut mesh, ("Ready", "NamespaceNotAllowed"), ["", ""], NOW, message);
    let live = LiveMesh {
        causes: vec![Cause::of_member("Objects", "ObjectsDiffer", "tenant-a", String::new())],
        ..LiveMesh::default()
    };
    let report = Report::new(&snapshot([mesh]), Some(&[("acme/prod".to_owned(), live)].into()));
    let reasons: Vec<&str> = report.problems.iter().map(|row| &*row.reason).collect();
    assert_eq!(reasons, ["NamespaceNotAllowed"]);
}

#[test]
fn json_has_problems_and_counts() {
    insta::assert_json_snapshot!(Report::new(&snapshot([broken()]), None));
}

//! Tests the ValidatingAdmissionPolicies of `deploy/agent.yaml` and `deploy/admission.yaml` on a real API server, with
//! the ServiceAccounts in `deploy/`.

mod agent;

use crate::api_server::{ApiClient, ApiServer, Response};
use clustermesh_core::{mesh::Protocol, plan::Settings};
use serde_json::{Value, json};

const PEERS: &str = "/apis/kilo.squat.ai/v1alpha1/peers";
const POLICIES: &str = "/apis/kilo.squat.ai/v1alpha1/peerpolicies";
const CONTROLLER: &str = "system:serviceaccount:clustermesh:clustermesh-controller";
const AGENT: &str = "system:serviceaccount:clustermesh-agent:wg-agent";
const ACCESSES: &str = "/apis/kilo.squat.ai/v1alpha1/sandboxaccesses";
/// The lists in the ConfigMap `clustermesh-admission` that the tests use.
const LISTS: &str = "networks: 10.20.0.0/16, fd00:20::/48\n  reachable: 10.10.0.0/16, fd00:10::/48\n  \
                     services: team-x, team-y/db, team-z/db:sql\n  locations: 10.30.0.0/16";

/// A Peer with these allowed IPs; `managed` = with the labels of a mesh.
fn peer(name: &str, managed: bool, allowed_ips: &[&str]) -> Value {
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": name, "labels": labels(managed)},
        "spec": {"publicKey": "A".repeat(43) + "=", "allowedIPs": allowed_ips},
    })
}

/// A PeerPolicy within [`LISTS`] that closes the default infrastructure ports.
fn policy(name: &str, managed: bool) -> Value {
    let ports = Settings::default().infrastructure_ports;
    let ports = ports.iter().map(|(protocol, port)| {
        assert_eq!(*protocol, Protocol::Tcp);
        json!({"port": port})
    });
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "PeerPolicy", "metadata": {"name": name, "labels": labels(managed)},
        "spec": {
            "source": "tenant-a", "sources": ["10.20.0.0/16", "fd00:20::/64"], "networks": ["10.20.0.0/16"],
            "allow": [{"to": ["10.10.0.0/16", "fd00:10::/64"]}, {"to": ["10.10.0.0/17"]}],
            "deny": [{"to": ["192.0.2.1/32"], "ports": [{"port": 6443}]}],
            "infrastructurePorts": ports.collect::<Vec<_>>(), "anchored": ["10.10.128.0/20"],
        },
    })
}

/// A SandboxAccess with these grants: namespace, Service and port name.
fn access(grants: &[(&str, &str, &str)]) -> Value {
    let grants = grants.iter().zip(20_000..).map(|((namespace, name, port), gateway_port)| {
        json!({"service": {"namespace": namespace, "name": name}, "port": port, "protocol": "TCP", "gatewayPort": gateway_port})
    });
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess", "metadata": {"name": "prod--nb", "labels": labels(true)},
        "spec": {"sandbox": "nb", "networks": ["10.20.16.0/20"], "grants": grants.collect::<Vec<_>>()},
    })
}

fn labels(managed: bool) -> Value {
    if managed {
        json!({"kilo-clustermesh.io/mesh": "prod", "kilo-clustermesh.io/source-cluster": "tenant-a"})
    } else {
        json!({})
    }
}

/// `object` with the value at `pointer` replaced.
fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    *object.pointer_mut(pointer).unwrap() = value;
    object
}

fn read_deploy(file: &str) -> String {
    std::fs::read_to_string(format!("{}/../deploy/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The result of a request: `Err` = the message with which an admission policy refused it, which must not be a CEL error.
fn verdict(answer: Response) -> Result<(), String> {
    answer.map(drop).map_err(|(code, message)| {
        assert_eq!(code, 403, "{message}");
        let (_, text) = message.split_once(" denied request: ").expect(&message);
        assert!(!text.contains("resulted in error"), "{message}");
        text.to_owned()
    })
}

/// Starts an API server with the ServiceAccounts and the policy for agents. With `lists`, the policy for objects is also
/// in force, with these lists in its ConfigMap.
async fn server(lists: Option<&str>) -> ApiServer {
    let server = ApiServer::start().await;
    for file in ["agent.yaml", "member-account.yaml"] {
        server.apply(&read_deploy(file)).await;
    }
    if let Some(lists) = lists {
        let admission = read_deploy("admission.yaml");
        let example = "# networks: 10.20.0.0/16, 172.16.2.0/24\n";
        assert!(admission.contains(example));
        server.apply(&admission.replace(example, &format!("{lists}\n"))).await;
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "annotations": {"team": "x"}}});
    server.post("/api/v1/nodes", &node).await.unwrap();
    let (labelled, agent) = (peer("in-force", true, &["10.20.0.0/24"]), server.client_as(AGENT, &[]));
    // The API server enforces a policy some time after its creation.
    clustermesh_lab::wait_until(
        "the policies to be in force",
        std::time::Duration::from_secs(60),
        async || {
            let label = json!({"metadata": {"labels": {"in": "force"}}});
            let objects = server.dry_run(PEERS, &labelled).await;
            match agent.patch("/api/v1/nodes/n1?dryRun=All", &label).await {
                Err((403, _)) if lists.is_none() || objects.is_err() => Ok(()),
                node => Err(format!("{node:?}, {objects:?}")),
            }
        },
    )
    .await
    .unwrap();
    server
}

async fn create(client: &ApiClient, object: &Value) -> Result<(), String> {
    let collection = match object["kind"].as_str() {
        Some("Peer") => PEERS,
        Some("SandboxAccess") => ACCESSES,
        _ => POLICIES,
    };
    verdict(client.post(&format!("{collection}?dryRun=All"), object).await)
}

const OUTSIDE: &str = " lies outside the networks in the ConfigMap clustermesh-admission: add it there if the mesh may route it \
                       here, else remove it from allowedNetworks in the ClusterMesh";
const NOT_OWN: &str = " lies outside the locations in the ConfigMap clustermesh-admission: add the pod and node networks of this \
                       cluster there, or remove locations from its entry in the ClusterMesh";
const UNREACHABLE: &str = " lies outside the reachable networks in the ConfigMap clustermesh-admission: add it there if the \
                           other members may reach it, else remove it from allowedNetworks of this cluster in the \
                           ClusterMesh";

// threat: stolen-controller-token
#[tokio::test]
async fn controller_writes_only_labelled_objects_within_lists() {
    let server = server(Some(LISTS)).await;
    let controller = server.client_as(CONTROLLER, &[]);
    controller_writes_labelled_objects_and_users_write_others(&server, &controller).await;
    peers_outside_network_list_are_refused(&controller).await;
    peer_policies_outside_lists_are_refused(&controller).await;
    grants_outside_service_list_are_refused(&controller).await;
    rules_apply_to_another_served_version(&server, &controller).await;
    invalid_list_refuses_and_absent_list_allows_any_network(&server, &controller).await;
}

async fn controller_writes_labelled_objects_and_users_write_others(server: &ApiServer, controller: &ApiClient) {
    let admin = server.client_as("", &[]);
    let user_refusal = "may not write objects of a ClusterMesh: change the ClusterMesh in its hub, or name this user under \
                        writers in the ConfigMap clustermesh-admission";
    let unlabelled = format!(
        "{CONTROLLER} may write only objects of a ClusterMesh: this one does not have the label kilo-clustermesh.io/mesh \
         (metadata.labels)"
    );
    let inside = ["10.20.1.0/24"];
    for object in [
        peer("prod--tenant-a--n1", true, &inside),
        policy("prod--tenant-a", true),
    ] {
        let collection = if object["kind"] == "Peer" { PEERS } else { POLICIES };
        let path = format!("{collection}/{}", object["metadata"]["name"].as_str().unwrap());
        let bare = with(object.clone(), "/metadata/labels", json!({}));
        let own = with(bare.clone(), "/metadata/name", json!("own"));

        let refused = create(&admin, &object).await.unwrap_err();
        assert!(refused.ends_with(user_refusal), "{refused}");
        assert_eq!(create(controller, &bare).await, Err(unlabelled.clone()));
        assert_eq!(controller.post(collection, &object).await.map(drop), Ok(()));
        assert_eq!(verdict(controller.put(&path, &bare).await), Err(unlabelled.clone()));
        for refused in [
            admin.put(&path, &bare).await,
            admin.put(&path, &object).await,
            admin.delete(&path).await,
        ] {
            let refused = verdict(refused).unwrap_err();
            assert!(refused.ends_with(user_refusal), "{refused}");
        }

        // The controller can take over an object of a user, but only by adding the label.
        assert_eq!(admin.post(collection, &own).await.map(drop), Ok(()));
        let path = format!("{collection}/own");
        assert_eq!(verdict(controller.put(&path, &own).await), Err(unlabelled.clone()));
        assert_eq!(verdict(controller.delete(&path).await), Err(unlabelled.clone()));
        let adopted = with(own, "/metadata/labels", labels(true));
        assert_eq!(
            verdict(controller.put(&format!("{path}?dryRun=All"), &adopted).await),
            Ok(())
        );
        assert_eq!(verdict(admin.delete(&path).await), Ok(()));
    }
}

async fn peers_outside_network_list_are_refused(controller: &ApiClient) {
    for inside in [
        &["10.20.7.0/24", "10.20.0.0/16", "fd00:20:0:1::/64"][..],
        &["10.20.1.7/24"],
        &[],
    ] {
        assert_eq!(create(controller, &peer("n", true, inside)).await, Ok(()), "{inside:?}");
    }
    for outside in [
        "10.21.0.0/24",
        "10.0.0.0/8",
        "0.0.0.0/0",
        "128.0.0.0/1",
        "::/0",
        "fd00:21::/64",
        "fd00::/16",
        // The CEL functions of the API server cannot parse these as networks.
        "10.20.0.0/33",
        "10.20.1.1",
        "::ffff:10.20.1.0/120",
        "010.20.1.0/24",
        "10.20.1.0/24,10.21.0.0/16",
        "",
    ] {
        let refused = create(controller, &peer("n", true, &["10.20.1.0/24", outside])).await;
        assert_eq!(refused, Err(format!("spec.allowedIPs: {outside}{OUTSIDE}")));
    }
    // Peers of the cluster's own nodes, whose packets pass no PeerPolicy, have a list of their own.
    let own = |network| {
        let mut peer = peer("n", true, &[network]);
        peer["metadata"]["annotations"] = json!({"kilo-clustermesh.io/location": "east"});
        peer
    };
    assert_eq!(create(controller, &own("10.30.1.0/24")).await, Ok(()));
    let refused = create(controller, &own("10.20.7.0/24")).await;
    assert_eq!(refused, Err(format!("spec.allowedIPs: 10.20.7.0/24{NOT_OWN}")));
}

async fn peer_policies_outside_lists_are_refused(controller: &ApiClient) {
    let valid = || policy("prod--tenant-b", true);
    assert_eq!(create(controller, &valid()).await, Ok(()));
    let closed = with(with(valid(), "/spec/allow", json!([])), "/spec/anchored", json!([]));
    assert_eq!(create(controller, &closed).await, Ok(()));
    // The largest list of sources that the CRD allows must not make the CEL expressions exceed their cost limit.
    let sources: Vec<String> = (0..8192).map(|n| format!("10.20.{}.{}/32", n / 256, n % 256)).collect();
    assert_eq!(
        create(controller, &with(valid(), "/spec/sources", json!(sources))).await,
        Ok(())
    );

    let ports = valid()["spec"]["infrastructurePorts"].clone();
    let udp: Vec<Value> = ports
        .as_array()
        .unwrap()
        .iter()
        .map(|port| json!({"port": port["port"], "protocol": "UDP"}))
        .collect();
    let missing_ports = |which: &str| {
        Err(format!(
            "spec.infrastructurePorts: does not contain {which} (TCP), which must stay closed to every member"
        ))
    };
    let all = "2379, 2380, 6443, 9587, 10249, 10250, 10255, 10256, 10257, 10259";
    let without_kubelet: Vec<&Value> = ports
        .as_array()
        .unwrap()
        .iter()
        .filter(|port| port["port"] != 10250)
        .collect();
    for (field, value, refused) in [
        (
            "sources",
            json!(["10.20.0.0/16", "0.0.0.0/0"]),
            Err(format!("spec.sources: 0.0.0.0/0{OUTSIDE}")),
        ),
        (
            "sources",
            json!(["10.10.0.0/16"]),
            Err(format!("spec.sources: 10.10.0.0/16{OUTSIDE}")),
        ),
        (
            "networks",
            json!(["128.0.0.0/1", "::/1"]),
            Err(format!("spec.networks: 128.0.0.0/1, ::/1{OUTSIDE}")),
        ),
        (
            "allow",
            json!([{"to": ["0.0.0.0/0"]}]),
            Err(format!("spec.allow[].to: 0.0.0.0/0{UNREACHABLE}")),
        ),
        (
            "allow",
            json!([{"to": ["10.10.0.0/24"]}, {"to": ["10.20.0.0/16"]}]),
            Err(format!("spec.allow[].to: 10.20.0.0/16{UNREACHABLE}")),
        ),
        (
            "anchored",
            json!(["fd00:11::/64"]),
            Err(format!("spec.anchored: fd00:11::/64{UNREACHABLE}")),
        ),
        ("infrastructurePorts", json!([]), missing_ports(all)),
        ("infrastructurePorts", json!(udp), missing_ports(all)),
        ("infrastructurePorts", json!(without_kubelet), missing_ports("10250")),
    ] {
        assert_eq!(
            create(controller, &with(valid(), &format!("/spec/{field}"), value)).await,
            refused,
            "{field}"
        );
    }
}

// threat: unlisted-grant
async fn grants_outside_service_list_are_refused(controller: &ApiClient) {
    let listed = [
        ("team-x", "any", "any"),
        ("team-y", "db", "any"),
        ("team-y", "db", ""),
        ("team-z", "db", "sql"),
    ];
    assert_eq!(create(controller, &access(&listed)).await, Ok(()));
    // The largest list of grants that the CRD allows must not make the CEL expressions exceed their cost limit.
    assert_eq!(create(controller, &access(&[listed[0]; 2048])).await, Ok(()));
    for (grants, refused) in [
        (&[("team-z", "db", "metrics")][..], "team-z/db:metrics"),
        (&[("team-z", "db", "")], "team-z/db:"),
        (&[("team-y", "dbx", "sql")], "team-y/dbx:sql"),
        (&[("team-", "x", "")], "team-/x:"),
        (
            &[listed[0], ("default", "a", "b"), ("default", "c", "d")],
            "default/a:b and 1 more",
        ),
    ] {
        let message = format!(
            "spec.grants: {refused} is not among the services in the ConfigMap clustermesh-admission: add it there if sandboxes may \
             reach it, else remove it from egress in the ClusterMesh"
        );
        assert_eq!(create(controller, &access(grants)).await, Err(message));
    }
    let outside = with(access(&listed), "/spec/networks", json!(["10.30.0.0/20"]));
    assert_eq!(
        create(controller, &outside).await,
        Err(format!("spec.networks: 10.30.0.0/20{OUTSIDE}"))
    );
}

/// Adds a version to the CRD of PeerPolicies, as a later release might do. The schema of this version accepts every field. The
/// same rules must apply to it, because both versions write the same stored object.
async fn rules_apply_to_another_served_version(server: &ApiServer, controller: &ApiClient) {
    let crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/peerpolicies.kilo.squat.ai";
    let stored: Value = serde_json::from_str(&server.kubectl(&["get", "--raw", crd]).await).unwrap();
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let mut versions = stored["spec"]["versions"].as_array().unwrap().clone();
    versions.push(json!({"name": "v1beta1", "served": true, "storage": false, "schema": schema}));
    server
        .patch(crd, &json!({"spec": {"versions": versions}}))
        .await
        .unwrap();
    let path = "/apis/kilo.squat.ai/v1beta1/peerpolicies?dryRun=All";
    let valid = with(policy("later", true), "/apiVersion", json!("kilo.squat.ai/v1beta1"));
    clustermesh_lab::wait_until(
        "the version to be served",
        std::time::Duration::from_secs(60),
        async || match controller.post(path, &valid).await {
            Err((404, message)) => Err(message),
            answer => {
                assert_eq!(verdict(answer), Ok(()));
                Ok(())
            }
        },
    )
    .await
    .unwrap();
    let bare = with(valid.clone(), "/metadata/labels", json!({}));
    assert!(verdict(controller.post(path, &bare).await).is_err());
    assert!(verdict(server.post(path, &valid).await).is_err());
    for (field, value, refused) in [
        (
            "networks",
            json!(["0.0.0.0/0"]),
            format!("spec.networks: 0.0.0.0/0{OUTSIDE}"),
        ),
        (
            "networks",
            json!(["10.20.0.0/99"]),
            format!("spec.networks: 10.20.0.0/99{OUTSIDE}"),
        ),
        (
            "allow",
            json!([{"to": ["x"]}]),
            format!("spec.allow[].to: x{UNREACHABLE}"),
        ),
    ] {
        let object = with(valid.clone(), &format!("/spec/{field}"), value);
        assert_eq!(verdict(controller.post(path, &object).await), Err(refused));
    }
}

/// An empty or invalid list of networks refuses Peers with allowed IPs, but no deletion. Without the list, every network is allowed, but
/// the label is still required.
async fn invalid_list_refuses_and_absent_list_allows_any_network(server: &ApiServer, controller: &ApiClient) {
    let config = "/api/v1/namespaces/clustermesh-agent/configmaps/clustermesh-admission";
    let object = peer("prod--tenant-a--n2", true, &["10.20.1.0/24"]);
    // The API server watches the ConfigMap: a change takes effect after some time.
    let set_lists = async |data: Value, query: &str, expected: Result<(), String>| {
        server.patch(config, &json!({"data": data})).await.unwrap();
        clustermesh_lab::wait_until(
            format!("{expected:?}"),
            std::time::Duration::from_secs(60),
            async || match verdict(controller.post(&format!("{PEERS}{query}"), &object).await) {
                answer if answer == expected => Ok(()),
                other => Err(format!("{other:?}")),
            },
        )
        .await
        .unwrap();
    };
    set_lists(
        json!({"networks": ""}),
        "?dryRun=All",
        Err(format!("spec.allowedIPs: 10.20.1.0/24{OUTSIDE}")),
    )
    .await;
    let invalid_list = "the ConfigMap clustermesh-admission lists entries that are not networks: 10.20.0.0/16; fd00::/8; \
                    write addresses with prefix lengths, separated by commas";
    set_lists(
        json!({"networks": "10.20.0.0/16; fd00::/8"}),
        "?dryRun=All",
        Err(invalid_list.into()),
    )
    .await;
    let gone = controller.delete(&format!("{PEERS}/prod--tenant-a--n1")).await;
    assert_eq!(verdict(gone), Ok(()));
    set_lists(json!({"networks": null}), "", Ok(())).await;
    assert_eq!(create(controller, &peer("n", true, &["192.0.2.0/24"])).await, Ok(()));
    assert!(create(controller, &peer("n", false, &["192.0.2.0/24"])).await.is_err());
}

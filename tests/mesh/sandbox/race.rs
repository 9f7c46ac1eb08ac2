//! Changes grants faster than they can be applied (granted, revoked, with other ports) while the attacker scans
//! continuously. What none of these grants names must stay closed in every intermediate state of controller and
//! gateways.

use std::{
    net::SocketAddr,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clustermesh_lab::{Echo, MESH, NAMESPACE, wait_until};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{SANDBOX, TestEnv, upheavals::Scene};
use crate::setup::PATIENCE;

/// Another Service for the same pods with two more ports: UDP echo servers, which are probed every 10 ms.
const ASIDE: &str = "
apiVersion: v1
kind: Service
metadata: {name: aside, namespace: default}
spec:
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: 8080}
  - {name: at-times, port: 81, targetPort: 8081, protocol: UDP}
  - {name: never, port: 82, targetPort: 8082, protocol: UDP}
";
const AT_TIMES: u16 = 8081;
const NEVER: u16 = 8082;
/// A socket without an echo for this long counts as closed.
const SILENCE: Duration = Duration::from_millis(500);
/// Number of changes. Each follows the one before as fast as the API server accepts it.
const CHANGES: usize = 24;
/// After this change the test waits until the echo server that is granted in some sets answers.
const AWAITED_CHANGE: usize = 7;

/// Restores the grants at the end.
// threat: grant-race
pub(super) async fn fast_changes_of_grants_open_nothing_more(env: &TestEnv<'_>, scene: &Scene<'_>) {
    let started = Instant::now();
    env.hub.apply(ASIDE).await.unwrap();
    let probe = env.lab.prober().unwrap();
    let mut servers = Vec::new();
    // Every pod needs the servers, because a gateway picks any endpoint of a Service.
    for web in env.hub.webs().await.unwrap() {
        for port in [AT_TIMES, NEVER] {
            let words = [&*probe, "udp-echo", &format!(":{port}")];
            let node = env.lab.node(&web.node);
            let mut server = node.pod_spawn(&format!("aside-{port}"), web.ip, words).unwrap();
            server.says("echoing on", PATIENCE).await.unwrap();
            servers.push(server);
        }
    }

    let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "ClusterMesh");
    let resource = ApiResource::from_gvk_with_plural(&kind, "clustermeshes");
    let meshes: Api<DynamicObject> = Api::namespaced_with(env.hub.client().await.unwrap(), NAMESPACE, &resource);
    let entry = {
        let mesh = meshes.get(MESH).await.unwrap();
        let entries = mesh.data["spec"]["clusters"].as_array().cloned().unwrap();
        entries.iter().position(|entry| entry["name"] == SANDBOX).unwrap()
    };
    let sets = sets_of_grants();
    let give = async |grants: &Value| {
        let change = json!([{"op": "add", "path": format!("/spec/clusters/{entry}/egress"), "value": grants}]);
        let change = Patch::<Value>::Json(serde_json::from_value(change).unwrap());
        meshes.patch(MESH, &PatchParams::default(), &change).await.unwrap();
    };
    // First grant both ports, to learn their gateway ports and to prove that the probes get answers.
    give(&json!([
        grant("web", "hub-web", &[]),
        grant("aside", "hub-aside", &[81, 82])
    ]))
    .await;
    let gateway = scene.granted.first().unwrap().ip();
    let askers = env.askers();
    let mut echoes = Vec::new();
    for name in ["at-times", "never"] {
        let socket = SocketAddr::new(gateway, gateway_port(env, name).await);
        echoes.push(askers.each_ref().map(|from| env.lab.watch_udp(from, socket).unwrap()));
    }
    let [at_times, never] = <[_; 2]>::try_from(echoes).unwrap();
    for echo in at_times.iter().chain(&never) {
        echo.answered_after(0).await.unwrap();
    }
    give(&sets[0]).await;
    for echo in at_times.iter().chain(&never) {
        echo.silent_for(SILENCE).await.unwrap();
    }
    let seen = |echoes: &[Echo; 2]| echoes.each_ref().map(|echo| echo.answers().len());
    let before_the_race = [&at_times, &never].map(seen);
    let before = revision(env).await;
    let racing = Instant::now();
    for (number, grants) in (1..=CHANGES).zip(sets.iter().cycle()) {
        give(grants).await;
        if number == AWAITED_CHANGE {
            let given = now();
            for echo in &at_times {
                echo.answered_after(given).await.unwrap();
            }
        }
    }
    give(&sets[0]).await;
    let raced = racing.elapsed();
    scene
        .wait_until_settled("after grants that changed faster than they were carried out")
        .await;
    for echo in &at_times {
        echo.silent_for(SILENCE).await.unwrap();
    }
    assert_eq!(seen(&never), before_the_race[1], "none of these grants names it");
    assert_ne!(
        revision(env).await,
        before,
        "no change of the grants ever reached the target"
    );
    println!(
        "{CHANGES} changes of the grants in {:.1} s, {:?} answers of what was granted at times, {:?} of them before; all of it: {:.1} s",
        raced.as_secs_f64(),
        seen(&at_times),
        before_the_race[0],
        started.elapsed().as_secs_f64()
    );
}

/// A grant of these ports of a Service; of all ports if the list is empty.
fn grant(name: &str, alias: &str, ports: &[u16]) -> Value {
    let protocol = |port: &u16| if *port == 80 { "TCP" } else { "UDP" };
    let ports = ports
        .iter()
        .map(|port| json!({"port": port, "protocol": protocol(port)}));
    let mut grant = json!({
        "service": {"cluster": "mgmt", "namespace": "default", "name": name},
        "as": {"namespace": "default", "name": alias},
    });
    if ports.len() > 0 {
        grant["ports"] = ports.collect();
    }
    grant
}

/// The grants at the start and the end; none; an additional Service; only that Service, at another port.
fn sets_of_grants() -> [Value; 4] {
    let web = grant("web", "hub-web", &[]);
    [
        json!([web.clone()]),
        json!([]),
        json!([web, grant("aside", "hub-aside", &[81])]),
        json!([grant("aside", "hub-aside", &[80])]),
    ]
}

/// The gateway port of this port of the Service, as soon as it is granted. It stays the same when it is granted again.
async fn gateway_port(env: &TestEnv<'_>, name: &str) -> u16 {
    wait_until(format!("the port {name} to be granted"), PATIENCE, async || {
        let access = env.access().await;
        let mut grants = access["spec"]["grants"].as_array().into_iter().flatten();
        let found = grants.find(|grant| grant["port"] == name);
        let port = found.and_then(|grant| u16::try_from(grant["gatewayPort"].as_u64()?).ok());
        port.ok_or_else(|| access["spec"]["grants"].to_string())
    })
    .await
    .unwrap()
}

/// The resourceVersion of the SandboxAccess.
async fn revision(env: &TestEnv<'_>) -> String {
    let access = env.access().await;
    access["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

/// Milliseconds since 1970.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

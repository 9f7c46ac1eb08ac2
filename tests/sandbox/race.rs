//! Grants that are changed faster than anybody carries them out: given, taken back, and with other ports, while the attacker
//! scans without a pause. Whatever controller and agents make of it on the way, what no grant ever named stays closed.

use std::{
    net::SocketAddr,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use clustermesh_lab::{Echo, MESH, NAMESPACE};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    SANDBOX, World,
    mesh::{PATIENCE, json as get},
    upheavals::Scene,
};

/// The same pods again, by two more ports: echoes, which are asked every 10 ms.
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
/// So long nothing comes before it is taken for closed.
const SILENCE: Duration = Duration::from_millis(500);
/// So many changes, each of which follows the one before as fast as the API server takes it.
const CHANGES: usize = 24;
/// But this one, after which the echo that is granted at times is waited for.
const CARRIED_OUT: usize = 7;

/// Leaves the grants as they were.
pub(super) async fn nothing_more_opens_while_grants_change_faster_than_they_are_carried_out(
    world: &World<'_>,
    scene: &Scene<'_>,
) {
    let started = Instant::now();
    world.hub.apply(ASIDE).await.unwrap();
    let web = scene.granted.first().unwrap().ip();
    let [at_times, never] = [AT_TIMES, NEVER].map(|port| SocketAddr::new(web, port));
    let probe = world.lab.prober().unwrap();
    let mut servers = Vec::new();
    for port in [AT_TIMES, NEVER] {
        let words = [&*probe, "udp-echo", &format!(":{port}")];
        let mut server = scene.node.pod_spawn(&format!("aside-{port}"), web, words).unwrap();
        server.says("echoing on", PATIENCE).await.unwrap();
        servers.push(server);
    }
    let askers = world.askers();
    let watch = |socket| askers.each_ref().map(|from| world.lab.watch_udp(from, socket).unwrap());
    let [at_times, never] = [at_times, never].map(watch);

    let kind = GroupVersionKind::gvk("kilo.squat.ai", "v1alpha1", "ClusterMesh");
    let resource = ApiResource::from_gvk_with_plural(&kind, "clustermeshes");
    let meshes: Api<DynamicObject> = Api::namespaced_with(world.hub.client().await.unwrap(), NAMESPACE, &resource);
    let entry = {
        let mesh = meshes.get(MESH).await.unwrap();
        let entries = mesh.data["spec"]["clusters"].as_array().cloned().unwrap();
        entries.iter().position(|entry| entry["name"] == SANDBOX).unwrap()
    };
    let before = revision(world).await;
    let sets = sets_of_grants();
    let give = async |grants: &Value| {
        let change = json!([{"op": "add", "path": format!("/spec/clusters/{entry}/egress"), "value": grants}]);
        let change = Patch::<Value>::Json(serde_json::from_value(change).unwrap());
        meshes.patch(MESH, &PatchParams::default(), &change).await.unwrap();
    };
    let racing = Instant::now();
    for (number, grants) in (1..=CHANGES).zip(sets.iter().cycle()) {
        give(grants).await;
        if number == CARRIED_OUT {
            let given = now();
            for echo in &at_times {
                echo.answered_after(given).await.unwrap();
            }
        }
    }
    give(&sets[0]).await;
    let raced = racing.elapsed();
    scene
        .settled("after grants that changed faster than they were carried out")
        .await;
    for echo in &at_times {
        echo.silent_for(SILENCE).await.unwrap();
    }
    let seen = |echoes: &[Echo; 2]| echoes.each_ref().map(|echo| echo.answers().len());
    assert_eq!(seen(&never), [0, 0], "no grant ever named it");
    assert_ne!(
        revision(world).await,
        before,
        "no change of the grants ever reached the target"
    );
    println!(
        "{CHANGES} changes of the grants in {:.1} s, {:?} packets of what was granted at times; all of it: {:.1} s",
        raced.as_secs_f64(),
        seen(&at_times),
        started.elapsed().as_secs_f64()
    );
}

/// As it is at the start and at the end; nothing; another one beside it; another one alone, by another port.
fn sets_of_grants() -> [Value; 4] {
    let grant = |name: &str, alias: &str, ports: Option<u16>| {
        let mut grant = json!({
            "service": {"cluster": "mgmt", "namespace": "default", "name": name},
            "as": {"namespace": "default", "name": alias},
        });
        if let Some(port) = ports {
            grant["ports"] = json!([{"port": port, "protocol": if port == 80 { "TCP" } else { "UDP" }}]);
        }
        grant
    };
    let web = grant("web", "hub-web", None);
    [
        json!([web.clone()]),
        json!([]),
        json!([web, grant("aside", "hub-aside", Some(81))]),
        json!([grant("aside", "hub-aside", Some(80))]),
    ]
}

/// Of what the sandbox may reach in the hub, as it stands.
async fn revision(world: &World<'_>) -> String {
    let policy = format!("{MESH}--{SANDBOX}");
    let policy = get(&world.hub, &["get", "peerpolicy", &policy]).await;
    policy["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

/// Milliseconds since 1970.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

//! Adds, revokes and changes grants faster than they can be applied, while the attacker scans continuously. A port that
//! none of these grants names must stay closed in every intermediate state of controller and gateways.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use clustermesh_lab::{EchoWatch, GATEWAYS, MESH, NAMESPACE, wait_until};
use serde_json::{Value, json};

use super::{SANDBOX, TestEnv, disruptions::ScannedGateway, gateways::access_name};
use crate::setup::{PATIENCE, json, unix_millis};

/// A Service for the pods of the Service `web`, with two UDP ports in addition to HTTP. The test probes the echo servers at the two
/// targetPorts through a gateway every 10 ms.
const SECOND_SERVICE: &str = "
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
/// The port of the pods to which the Service port `at-times` leads. Some of [`grant_sets`] contain that Service port.
const SOMETIMES_GRANTED: u16 = 8081;
/// The port of the pods to which the Service port `never` leads. That Service port is granted once before the race; none of
/// [`grant_sets`], which the race applies, contains it.
const NOT_GRANTED_IN_RACE: u16 = 8082;
/// The wait for the last echoes after the gateways have applied a revocation. A probe ignores echoes that take longer than 1 s.
const SILENCE: Duration = Duration::from_secs(2);
/// Number of changes. Except after [`AWAITED_CHANGE`], each follows the one before as fast as the API server accepts it.
const CHANGES: usize = 24;
/// After this change, which applies a set with `at-times`, the test waits until the echo server at `SOMETIMES_GRANTED` answers.
const AWAITED_CHANGE: usize = 7;

/// At the end the grants are the same as at the start.
// threat: grant-race
pub(super) async fn fast_grant_changes_keep_the_ungranted_port_closed(env: &TestEnv<'_>, scanned: &ScannedGateway<'_>) {
    let started = Instant::now();
    env.hub.apply(SECOND_SERVICE).await.unwrap();
    let probe = env.lab.probe_program().unwrap();
    let mut servers = Vec::new();
    // Every pod needs the servers, because a gateway picks any endpoint of a Service.
    for web in env.hub.web_pods().await.unwrap() {
        for port in [SOMETIMES_GRANTED, NOT_GRANTED_IN_RACE] {
            let args = [&*probe, "udp-echo", &format!(":{port}")];
            let node = env.lab.node(&web.node);
            let mut server = node.pod_spawn(&format!("aside-{port}"), web.ip, args).unwrap();
            server.wait_for_log("echoing on", PATIENCE).await.unwrap();
            servers.push(server);
        }
    }

    let mesh = {
        let stored = json(&env.hub, &["-n", NAMESPACE, "get", "clustermesh", MESH]).await;
        json!({
            "apiVersion": stored["apiVersion"], "kind": stored["kind"],
            "metadata": {"name": MESH, "namespace": NAMESPACE}, "spec": stored["spec"],
        })
    };
    let entries = mesh["spec"]["clusters"].as_array().unwrap();
    let entry_index = entries.iter().position(|entry| entry["name"] == SANDBOX).unwrap();
    let sets = grant_sets();
    let apply_grants = async |grants: &Value| {
        let mut changed = mesh.clone();
        changed["spec"]["clusters"][entry_index]["egress"] = grants.clone();
        env.hub.apply(&changed.to_string()).await.unwrap();
    };
    // Before the race, both ports are granted once, to learn their gateway ports and to prove that the probes get answers.
    apply_grants(&json!([
        grant("web", "hub-web", &[]),
        grant("aside", "hub-aside", &[81, 82])
    ]))
    .await;
    let gateway = scanned.granted.first().unwrap().ip();
    let clients = env.clients();
    let mut echoes = Vec::new();
    for name in ["at-times", "never"] {
        let socket = SocketAddr::new(gateway, gateway_port(env, name).await);
        echoes.push(clients.each_ref().map(|from| env.lab.watch_udp(from, socket).unwrap()));
    }
    let [at_times, never] = <[_; 2]>::try_from(echoes).unwrap();
    for echo in at_times.iter().chain(&never) {
        echo.wait_for_echo_after(0).await.unwrap();
    }
    apply_grants(&sets[0]).await;
    wait_until_only_web_is_granted(env).await;
    for echo in at_times.iter().chain(&never) {
        echo.wait_for_silence(SILENCE).await.unwrap();
    }
    let seen = |echoes: &[EchoWatch; 2]| echoes.each_ref().map(|echo| echo.echo_times().len());
    let echoes_before = [&at_times, &never].map(seen);
    let version_before = access_version(env).await;
    let racing = Instant::now();
    for (number, grants) in (1..=CHANGES).zip(sets.iter().cycle()) {
        apply_grants(grants).await;
        if number == AWAITED_CHANGE {
            let granted_at = unix_millis();
            for echo in &at_times {
                echo.wait_for_echo_after(granted_at).await.unwrap();
            }
        }
    }
    apply_grants(&sets[0]).await;
    let raced = racing.elapsed();
    wait_until_only_web_is_granted(env).await;
    scanned
        .wait_until_settled("after grants that changed faster than they were applied")
        .await;
    for echo in &at_times {
        echo.wait_for_silence(SILENCE).await.unwrap();
    }
    // `never` got no answer since the race began.
    assert_eq!(seen(&never), echoes_before[1], "no grant names this port");
    assert_ne!(
        access_version(env).await,
        version_before,
        "no change of the grants reached the SandboxAccess"
    );
    println!(
        "{CHANGES} changes of the grants in {:.1} s, {:?} answers of the port `at-times`, {:?} of them before; in total {:.1} s",
        raced.as_secs_f64(),
        seen(&at_times),
        echoes_before[0],
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

/// Four sets of grants: (0) `web`, as at the start and the end; (1) none; (2) `web`, and `at-times` of `aside`;
/// (3) only `http` of `aside`.
fn grant_sets() -> [Value; 4] {
    let web = grant("web", "hub-web", &[]);
    [
        json!([web.clone()]),
        json!([]),
        json!([web, grant("aside", "hub-aside", &[81])]),
        json!([grant("aside", "hub-aside", &[80])]),
    ]
}

/// Waits until this Service port is granted, and returns its gateway port. A port that is granted again gets the same
/// gateway port.
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

/// Waits until the controller has observed the current mesh, the SandboxAccess grants `web` and nothing else, and each gateway has
/// applied it.
async fn wait_until_only_web_is_granted(env: &TestEnv<'_>) {
    wait_until("the gateways to apply the grant of web", PATIENCE, async || {
        let mesh = json(&env.hub, &["-n", NAMESPACE, "get", "clustermesh", MESH]).await;
        // Without a grant there is no SandboxAccess, and the next one has generation 1 again, but another UID.
        let list = json(&env.hub, &["get", "sandboxaccesses"]).await;
        let mut accesses = list["items"].as_array().into_iter().flatten();
        let access = accesses.find(|access| access["metadata"]["name"] == access_name());
        let access = access.ok_or("no SandboxAccess")?;
        let grants: Vec<&Value> = access["spec"]["grants"].as_array().into_iter().flatten().collect();
        let gateways = json(&env.hub, &["-n", GATEWAYS, "get", "sandboxgateways"]).await;
        let gateways = gateways["items"].as_array().into_iter().flatten();
        let applied: Vec<&Value> = gateways.map(|gateway| &gateway["status"]["applied"][0]).collect();
        let is_observed = mesh["status"]["observedGeneration"] == mesh["metadata"]["generation"];
        let is_web = grants.len() == 1 && grants[0]["service"]["name"] == "web";
        let is_current = |one: &&Value| {
            ["uid", "generation"]
                .iter()
                .all(|key| one[key] == access["metadata"][key])
        };
        let is_applied = applied.iter().all(is_current);
        if is_observed && is_web && is_applied && !applied.is_empty() {
            Ok(())
        } else {
            Err(format!("{is_observed} {grants:?} {applied:?}"))
        }
    })
    .await
    .unwrap();
}

/// The resourceVersion of the SandboxAccess.
async fn access_version(env: &TestEnv<'_>) -> String {
    let access = env.access().await;
    access["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

//! Tests grants of every type of Service in both address families, on three whole clusters: a hub with gateways and two
//! sandboxes. Each granted Service with pods in the pod network answers through its mirrored Service, and an attacker finds
//! nothing else. The granted Service with a pod in the host network is refused. One sandbox has both families and IPv4
//! WireGuard addresses, the other has only IPv6. Their pod and Service ranges are equal.

mod gateway;
mod live;
mod test_env;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use clustermesh_lab::{Attacker, EchoWatch, GATEWAYS, Lab, LabPlan, MESH, RunningPod, wait_until};
use serde_json::Value;
use test_env::{Sandbox, TestEnv, addresses};

use crate::setup::{HUB, PATIENCE, json, pod, state::versions, unix_millis};

/// The sandbox with IPv4 WireGuard addresses.
const SANDBOX_V4: &str = "notebooks";
/// The sandbox without IPv4.
const SANDBOX_V6: &str = "workflows";

/// A flow without an echo for this time has ended.
const SILENCE: Duration = Duration::from_secs(2);
/// Services whose endpoints are pods in the pod network.
const POD_SERVICES: [&str; 4] = ["store", "store-headless", "store-ports", "store-balanced"];

/// The YAML list of grants of `services` and of `hosted`, whose pod is in the host network. A grant names its ports by
/// number or by name; a grant without `ports` opens all ports.
fn grants(services: &[&str]) -> String {
    let one = |name: &&str| {
        let ports = match *name {
            "store" => ", ports: [{port: 80}, {port: echo, protocol: UDP}]",
            "store-ports" => ", ports: [{port: http}]",
            _ => "",
        };
        format!("{{service: {{cluster: mgmt, namespace: default, name: {name}}}{ports}}}")
    };
    let all: Vec<String> = services.iter().map(one).collect();
    format!(
        "[{}, {{service: {{cluster: mgmt, namespace: default, name: hosted}}}}]",
        all.join(", ")
    )
}

// threat: equal-pod-networks, gateway-ungranted
#[tokio::test]
async fn grant_of_each_service_type_opens_only_its_endpoints() {
    let plan = LabPlan::clusters(&[(HUB, 2), (SANDBOX_V4, 1), (SANDBOX_V6, 1)]);
    let lab = Lab::start(
        plan.dual_stack()
            .ipv6_only(SANDBOX_V6)
            .with_ranges_of(SANDBOX_V6, SANDBOX_V4),
    )
    .await
    .unwrap();
    let env = TestEnv::up(&lab).await;
    for sandbox in &env.sandboxes {
        mirrored_services_answer_through_every_gateway(&env, sandbox).await;
    }
    host_network_service_is_refused(&env).await;
    replacement_pod_is_reached_without_any_write(&env).await;
    let [v4, v6] = &env.sandboxes;
    live::quarantine_and_tighter_profile_stop_running_flows(&env, v4).await;
    tokio::join!(
        scan_with_forged_allowed_ips_finds_only_grants(&env, v4, v6),
        scan_with_forged_allowed_ips_finds_only_grants(&env, v6, v4),
    );
    revoked_grant_closes_and_others_stay_open(&env).await;
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Every pod of the Deployment `store` answers and sees each gateway's pod address as the source.
async fn mirrored_services_answer_through_every_gateway(env: &TestEnv<'_>, sandbox: &Sandbox<'_>) {
    let names: BTreeSet<String> = env.store_pods().await.into_iter().map(|pod| pod.name).collect();
    let gateways: BTreeSet<IpAddr> = env
        .gateways
        .iter()
        .map(|g| sandbox.pick_address(addresses(&g.pod)))
        .collect();
    assert_eq!((names.len(), gateways.len()), (2, 2));
    for (service, port) in POD_SERVICES.into_iter().zip([80, 8080, 80, 80]) {
        let url = format!("http://{}", sandbox.service_socket(service, port).await);
        for from in sandbox.clients() {
            let (mut pods, mut sources) = (BTreeSet::new(), BTreeSet::new());
            let all = async || {
                let answer = env.lab.http_get_until_answered(&from, &url).await;
                let answer = answer.map_err(|error| error.to_string())?;
                let expected = names.contains(&answer.pod) && gateways.contains(&answer.client_ip);
                assert!(expected, "{service}, from {from}: {answer:?}");
                pods.insert(answer.pod);
                sources.insert(answer.client_ip);
                if pods == names && sources == gateways {
                    Ok(())
                } else {
                    Err(format!("{pods:?} from {sources:?}"))
                }
            };
            wait_until(
                format!("{service} to answer {from} from every pod through every gateway"),
                PATIENCE,
                all,
            )
            .await
            .unwrap();
        }
    }
    let udp = sandbox.service_socket("store", 9000).await;
    // The grant of `store` does not contain port 81, so the mirrored Service lacks it.
    let admin = sandbox.service_socket("store", 81).await;
    for from in sandbox.clients() {
        let open = env.open_sockets(&from, &[udp, admin].into()).await;
        assert_eq!(open, [BTreeSet::new(), [udp].into()], "store, from {from}");
    }
}

/// Gateways refuse the grant of `hosted`, and no client reaches that Service.
async fn host_network_service_is_refused(env: &TestEnv<'_>) {
    let hosted = env.hub.pods_of_app("hosted").await.unwrap().remove(0);
    let hosts: Vec<String> = addresses(&hosted).map(|ip| ip.to_string()).collect();
    // Each SandboxAccess has two entries for `hosted`, one for each port. A refusal names the SandboxAccess and the field in it.
    let mut refused = BTreeSet::new();
    for sandbox in &env.sandboxes {
        let access = env.granted_ports(sandbox).await;
        let entries = access.iter().enumerate().filter(|(_, one)| one.service == "hosted");
        let fields: Vec<String> = entries
            .map(|(index, _)| format!("spec.grants[{index}].service"))
            .collect();
        assert_eq!(fields.len(), 2);
        refused.extend(
            fields
                .into_iter()
                .map(|field| (format!("{MESH}--{}", sandbox.name()), field)),
        );
    }
    let objects = json(&env.hub, &["get", "sandboxgateways", "-n", GATEWAYS]).await;
    for object in objects["items"].as_array().unwrap() {
        let refusals = object["status"]["refused"].as_array().cloned().unwrap_or_default();
        let parts = refusals.iter().map(|one| (text(&one["name"]), text(&one["field"])));
        assert_eq!(parts.collect::<BTreeSet<_>>(), refused, "{refusals:#?}");
        for one in refusals {
            let message = text(&one["message"]);
            let named = hosts.iter().any(|ip| message.contains(&format!("{ip} ")));
            assert_eq!(one["reason"], "EndpointForbidden");
            assert!(
                named && message.contains("--endpoint-network"),
                "{message}, hosts {hosts:?}"
            );
        }
    }
    for sandbox in &env.sandboxes {
        let mut sockets: BTreeSet<SocketAddr> = env
            .gateway_sockets(sandbox, "hosted", "http")
            .await
            .into_iter()
            .collect();
        sockets.extend(env.gateway_sockets(sandbox, "hosted", "echo").await);
        // The hub nodes' own addresses are not scanned: only a firewall on the underlay could close them.
        for port in [80, 9000] {
            sockets.insert(sandbox.service_socket("hosted", port).await);
        }
        for from in sandbox.clients() {
            let open = env.open_sockets(&from, &sockets).await;
            assert_eq!(open, [BTreeSet::new(), BTreeSet::new()], "from {from}");
        }
    }
}

/// New flows reach the new pod, and UDP flows that began before the old pod was deleted continue.
async fn replacement_pod_is_reached_without_any_write(env: &TestEnv<'_>) {
    let before = object_versions(env).await;
    let deleted = env.store_pods().await.remove(0);
    let mut flows: Vec<EchoWatch> = Vec::new();
    for sandbox in &env.sandboxes {
        for at in env.gateway_sockets(sandbox, "store", "echo").await {
            flows.extend(sandbox.clients().map(|from| env.lab.watch_udp(&from, at).unwrap()));
        }
    }
    wait_until_all_answer(&flows).await;
    env.hub.kubectl(["delete", "pod", &deleted.name]).await.unwrap();
    env.hub.wait_for_rollout("default", "deployment/store").await.unwrap();
    let pods = wait_until("a new pod", PATIENCE, async || {
        let pods = env.store_pods().await;
        if pods.len() == 2 && !pods.contains(&deleted) {
            Ok(pods)
        } else {
            Err(format!("{pods:?}"))
        }
    })
    .await
    .unwrap();
    for gateway in &env.gateways {
        wait_until(format!("the new pod at {}", gateway.pod.name), PATIENCE, async || {
            // Established connections may continue to the endpoints in these two sets.
            let mut words = BTreeSet::new();
            for set in ["endpoints4", "endpoints6"] {
                let list = ["nft", "list", "set", "inet", "clustermesh", set];
                let list = env.lab.run_at(&pod(&gateway.pod), &list).await;
                let list = list.map_err(|error| error.to_string())?.stdout;
                words.extend(list.split_whitespace().map(str::to_owned));
            }
            let has_pod = |pod: &RunningPod| addresses(pod).all(|ip| words.contains(&ip.to_string()));
            let has_deleted = addresses(&deleted).any(|ip| words.contains(&ip.to_string()));
            if pods.iter().all(has_pod) && !has_deleted {
                Ok(())
            } else {
                Err(format!("{pods:?} without {deleted:?}: {words:?}"))
            }
        })
        .await
        .unwrap();
    }
    wait_until_all_answer(&flows).await;
    for sandbox in &env.sandboxes {
        mirrored_services_answer_through_every_gateway(env, sandbox).await;
    }
    assert_eq!(object_versions(env).await, before, "replacing a pod causes no write");
}

async fn wait_until_all_answer(flows: &[EchoWatch]) {
    let since = unix_millis();
    for flow in flows {
        flow.wait_for_echo_after(since).await.unwrap();
    }
}

/// The resourceVersions of all objects for the sandboxes, in every cluster.
async fn object_versions(env: &TestEnv<'_>) -> Vec<BTreeMap<String, String>> {
    let mut all = Vec::new();
    for kind in ["sandboxaccesses", "sandboxgateways", "peers", "peerpolicies"] {
        all.push(versions(&env.hub, kind).await);
    }
    for sandbox in &env.sandboxes {
        for kind in ["peers", "peerpolicies", "services", "endpointslices"] {
            all.push(versions(&sandbox.cluster, kind).await);
        }
    }
    all
}

/// Leaves the forged allowed IPs in place: afterwards the sandbox sends to all scanned addresses through the last gateway.
// threat: gateway-ungranted
async fn scan_with_forged_allowed_ips_finds_only_grants(env: &TestEnv<'_>, sandbox: &Sandbox<'_>, other: &Sandbox<'_>) {
    let mut granted = BTreeSet::new();
    for gateway in &env.gateways {
        granted.extend(env.granted_sockets(sandbox, gateway).await.into_iter().flatten());
    }
    let all = sandbox
        .cluster
        .foreign_sockets(&[&env.hub, &other.cluster], &granted)
        .await;
    let all: Vec<SocketAddr> = all.unwrap().into_keys().chain(granted).collect();
    let mut addresses: BTreeSet<IpAddr> = all.iter().map(SocketAddr::ip).collect();
    addresses.extend(env.gateways.iter().flat_map(|gateway| &gateway.wireguard));
    let ports: BTreeSet<u16> = all.iter().map(SocketAddr::port).chain([51820]).collect();
    let at = |ip: &IpAddr| ports.iter().map(|port| SocketAddr::new(*ip, *port)).collect::<Vec<_>>();
    let sockets: BTreeSet<SocketAddr> = addresses.iter().flat_map(at).collect();
    let peers = json(&sandbox.cluster, &["get", "peers"]).await;
    let attacker = Attacker::new(env.lab, sandbox.name(), &sandbox.web.node).await.unwrap();
    assert_eq!(attacker.peers.len(), env.gateways.len());
    for gateway in &env.gateways {
        let peers = peers["items"].as_array().unwrap();
        let chosen = peers
            .iter()
            .find(|peer| peer["spec"]["publicKey"] == *gateway.key)
            .unwrap();
        let chosen = text(&chosen["metadata"]["name"]);
        let kept_on_underlay = attacker.route_through(&chosen, &addresses).await.unwrap();
        assert_eq!(kept_on_underlay, BTreeSet::new());
        let granted = env.granted_sockets(sandbox, gateway).await;
        // Each of `POD_SERVICES` has one granted TCP port with a server, and `store` one granted UDP port.
        assert_eq!(granted.each_ref().map(BTreeSet::len), [4, 1]);
        for from in sandbox.clients() {
            // Establish the session first: until then, WireGuard stages only some of a scan's packets and drops the
            // others.
            env.lab.wait_for_open_sockets(&from, &granted[0]).await.unwrap();
            let open = env.open_sockets(&from, &sockets).await;
            println!("{from}, {} sockets through {chosen}: {open:?}", sockets.len());
            assert_eq!(open, granted);
        }
    }
}

/// Uses the last gateway, through which the sandbox sends to all scanned addresses since the scan.
// threat: gateway-revoked-connection
async fn revoked_grant_closes_and_others_stay_open(env: &TestEnv<'_>) {
    let [v4, _] = &env.sandboxes;
    let [from, _] = v4.clients();
    let last = env.gateways.last().unwrap();
    let udp = *env.gateway_sockets(v4, "store", "echo").await.last().unwrap();
    let watch = env.lab.watch_udp(&from, udp).unwrap();
    watch.wait_for_echo_after(unix_millis()).await.unwrap();
    let mut before = Vec::new();
    for sandbox in &env.sandboxes {
        before.push(env.granted_sockets(sandbox, last).await);
    }

    let revoked_at = env.apply_grants(&POD_SERVICES[1..]).await;
    for (sandbox, before) in env.sandboxes.iter().zip(&before) {
        let remaining = wait_until(
            "the SandboxAccess to be without the grant",
            PATIENCE,
            async || match env.granted_sockets(sandbox, last).await {
                [tcp, udp] if tcp.len() == 3 && udp.is_empty() => Ok([tcp, udp]),
                other => Err(format!("{other:?}")),
            },
        );
        let remaining = remaining.await.unwrap();
        let [from, _] = sandbox.clients();
        let revoked = before[0].difference(&remaining[0]).copied().collect();
        env.lab.wait_for_closed_sockets(&from, &revoked).await.unwrap();
        let open = env
            .open_sockets(&from, &before.iter().flatten().copied().collect())
            .await;
        assert_eq!(open, remaining, "from {from}");
    }
    // The open flow ends too.
    let end = watch.wait_for_silence(SILENCE).await.unwrap().unwrap_or_default();
    println!(
        "last answer {} ms after kubectl apply was called",
        end.saturating_sub(revoked_at)
    );

    let granted_at = env.apply_grants(&POD_SERVICES).await;
    // The grant gets the same gateway port as before.
    let first = watch.wait_for_echo_after(granted_at).await.unwrap();
    println!("first answer {} ms after kubectl apply was called", first - granted_at);
    for (sandbox, before) in env.sandboxes.iter().zip(&before) {
        let [from, _] = sandbox.clients();
        env.lab.wait_for_open_sockets(&from, &before[0]).await.unwrap();
    }
}

//! Changes quarantine and profile of a sandbox while its pod and its node send continuously. A sandbox reaches only
//! granted ports at the gateways; a cluster-meshed member reaches every pod at its own address and nothing at the
//! gateways. Each flow gets answers only between the change that opens it and the end of the change that closes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use clustermesh_lab::{EchoWatch, GATEWAYS, MESH, NAMESPACE, RunningPod, TrafficClient, wait_until};

use super::{
    HUB, PATIENCE, POD_SERVICES, SANDBOX_V4, SANDBOX_V6, Sandbox, TestEnv, addresses, grants, text, unix_millis,
};
use crate::setup::{json, state::versions};

/// A port that no Service lists.
const UNLISTED_PORT: u16 = 9100;
/// The port `stream` of the granted Service `store-headless`.
const STREAM_PORT: u16 = 8200;
/// The maximum time from the report that a change is applied to the last answer of a closed path, in milliseconds, also on a busy machine.
const CLOSE_LIMIT: u128 = 30_000;
/// A flow without an answer for this many milliseconds counts as closed. A UDP probe ignores answers that take longer than 1 s.
const SILENCE: u128 = 2000;
/// Number of TCP connections from the pod through each gateway, and again from the node. When a grant returns, a gateway with a wrong
/// rule would take the packets of an old connection for a new connection and choose a random endpoint. The test sees an answer only if
/// the old endpoint is chosen again, so with one connection it could miss the bug.
const STREAMS: usize = 3;

/// A kind of destination that is probed continuously over UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Path {
    /// The mirrored Service: open in both profiles.
    MirroredService,
    /// Granted ports at the gateways: open for a sandbox only.
    Gateways,
    /// The pod behind the Service, at its own address and port: open for a cluster-meshed member only.
    Pod,
    /// A port of that pod that no Service lists: open for a cluster-meshed member only.
    UnlistedPort,
    /// The pod's port number at the gateways' addresses: never open.
    UngrantedGatewayPort,
}

/// The paths that are open for a sandbox and for a cluster-meshed member. The mirrored Service is the first, so that `[1..]` leaves it
/// out.
const SANDBOX_PATHS: &[Path] = &[Path::MirroredService, Path::Gateways];
const MESHED_PATHS: &[Path] = &[Path::MirroredService, Path::Pod, Path::UnlistedPort];

/// Probes of one path, from the pod and from the node.
struct PathProbes {
    sockets: BTreeSet<SocketAddr>,
    echoes: Vec<EchoWatch>,
    /// Flows that may, but need not, get answers while the path is open.
    optional_echoes: Vec<EchoWatch>,
    /// The periods in which answers are allowed, in milliseconds since 1970. The last one has no end while the path is
    /// open.
    windows: Vec<(u128, Option<u128>)>,
}

/// The state of the SandboxAccess in the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    WithGrants,
    WithoutGrants,
    Absent,
}

struct Flows<'a> {
    env: &'a TestEnv<'a>,
    sandbox: &'a Sandbox<'a>,
    store: Vec<RunningPod>,
    paths: BTreeMap<Path, PathProbes>,
    /// TCP connections that a change has closed, each with the time from which it must not get answers.
    ended: Vec<(EchoWatch, u128)>,
}

// threat: profile-tightened, quarantine, closed-member-continues
pub(super) async fn quarantine_and_tighter_profile_stop_running_flows(env: &TestEnv<'_>, sandbox: &Sandbox<'_>) {
    let store = env.store_pods().await;
    let probe = env.lab.probe_program().unwrap();
    let serve = |how: &str, port: u16| {
        let each = store.iter().map(|web| {
            let args = [&*probe, how, &format!(":{port}")];
            env.lab.node(&web.node).pod_spawn(how, web.ip, args).unwrap()
        });
        each.collect::<Vec<_>>()
    };
    let _servers = [serve("udp-echo", UNLISTED_PORT), serve("stream-serve", STREAM_PORT)];
    let mut flows = Flows {
        env,
        sandbox,
        store,
        paths: BTreeMap::new(),
        ended: Vec::new(),
    };
    let called = unix_millis();
    let gateways: BTreeSet<SocketAddr> = env
        .gateway_sockets(sandbox, "store", "echo")
        .await
        .into_iter()
        .collect();
    let ungranted = gateways.iter().map(|socket| SocketAddr::new(socket.ip(), 9000));
    flows.watch(Path::UngrantedGatewayPort, ungranted.collect());
    flows.watch(Path::Gateways, gateways);
    flows.watch(Path::Pod, [flows.store_at(9000)].into());
    flows.watch(Path::UnlistedPort, [flows.store_at(UNLISTED_PORT)].into());
    flows.watch_mirrored_service().await;
    let (sandboxed, meshed, standard) = (mesh(env, "sandbox"), mesh(env, "cluster-meshed"), mesh(env, "standard"));

    flows
        .wait_until_in_force("a sandbox", called, SANDBOX_PATHS, Access::WithGrants)
        .await;
    let streams = flows.streams_through_gateways().await;
    let objects = flows.objects().await;
    let called = flows.apply(&quarantined(&sandboxed)).await;
    flows
        .wait_until_in_force("quarantine of a sandbox", called, &[], Access::WithoutGrants)
        .await;
    flows.mark_ended(streams);
    assert_eq!(flows.objects().await, objects, "quarantine keeps the sandbox's objects");
    let called = flows.apply(&sandboxed).await;
    flows
        .wait_until_in_force("end of the quarantine", called, SANDBOX_PATHS, Access::WithGrants)
        .await;

    let streams = flows.streams_through_gateways().await;
    let called = flows
        .annotate(&format!("kilo-clustermesh.io/quarantine={SANDBOX_V4}"))
        .await;
    flows
        .wait_until_in_force("quarantine by annotation", called, &[], Access::WithoutGrants)
        .await;
    flows.mark_ended(streams);
    let called = flows.annotate("kilo-clustermesh.io/quarantine-").await;
    flows
        .wait_until_in_force("end of the quarantine", called, SANDBOX_PATHS, Access::WithGrants)
        .await;

    let streams = flows.streams_through_gateways().await;
    let called = flows.apply(&meshed).await;
    flows
        .wait_until_in_force("sandbox to cluster-meshed", called, MESHED_PATHS, Access::Absent)
        .await;
    flows.mark_ended(streams);
    let direct = flows.stream(1, flows.store_at(STREAM_PORT)).await;
    let called = flows.apply(&quarantined(&meshed)).await;
    flows
        .wait_until_in_force("quarantine of a trusted member", called, &[], Access::Absent)
        .await;
    let called = flows.apply(&meshed).await;
    flows
        .wait_until_in_force("end of the quarantine", called, MESHED_PATHS, Access::Absent)
        .await;
    // Between trusted members, a connection survives a quarantine unless it times out.
    direct.wait_for_echo_after(unix_millis()).await.unwrap();
    flows.paths.get_mut(&Path::Pod).unwrap().optional_echoes.push(direct);

    let called = flows.apply(&sandboxed).await;
    flows
        .wait_until_in_force("cluster-meshed to sandbox", called, SANDBOX_PATHS, Access::WithGrants)
        .await;
    let streams = flows.streams_through_gateways().await;
    let called = flows.apply(&standard).await;
    flows
        .wait_until_in_force("sandbox to standard", called, &[], Access::Absent)
        .await;
    flows.mark_ended(streams);
    // The mirrored Service is deleted, and the next one may have another address.
    flows.paths.remove(&Path::MirroredService);
    let called = flows.apply(&meshed).await;
    flows
        .wait_until_in_force("standard to cluster-meshed", called, &MESHED_PATHS[1..], Access::Absent)
        .await;
    flows.watch_mirrored_service().await;
    flows
        .wait_until_in_force("the mirrored Service", called, MESHED_PATHS, Access::Absent)
        .await;
    // The connection `direct` also survives the time in which the member is a sandbox or standard.
    let direct = flows.paths[&Path::Pod].optional_echoes.last().unwrap();
    direct.wait_for_echo_after(unix_millis()).await.unwrap();
    let called = flows.apply(&standard).await;
    flows
        .wait_until_in_force("cluster-meshed to standard", called, &[], Access::Absent)
        .await;
    flows.paths.remove(&Path::MirroredService);
    let called = flows.apply(&sandboxed).await;
    flows
        .wait_until_in_force("standard to sandbox", called, &SANDBOX_PATHS[1..], Access::WithGrants)
        .await;
    flows.watch_mirrored_service().await;
    flows
        .wait_until_in_force("the mirrored Service", called, SANDBOX_PATHS, Access::WithGrants)
        .await;
}

/// The mesh in which the member `SANDBOX_V4` has this profile.
fn mesh(env: &TestEnv<'_>, profile: &str) -> String {
    let grants = grants(&POD_SERVICES);
    let sandboxes: &[&str] = if profile == "cluster-meshed" {
        &[SANDBOX_V6]
    } else {
        &[SANDBOX_V4, SANDBOX_V6]
    };
    let text = env
        .product
        .mesh_with(sandboxes, &[(SANDBOX_V4, &grants), (SANDBOX_V6, &grants)]);
    match profile {
        // The entry of `SANDBOX_V4` is the first.
        "standard" => text.replacen("isolationProfile: sandbox", "isolationProfile: standard", 1),
        _ => text,
    }
}

fn quarantined(mesh: &str) -> String {
    let entry = format!("- name: {SANDBOX_V4}\n");
    mesh.replacen(&entry, &format!("{entry}    quarantine: true\n"), 1)
}

impl PathProbes {
    /// The time of the last answer, without the optional flows.
    fn last(&self) -> u128 {
        let last = self.echoes.iter().filter_map(|echo| echo.echo_times().pop());
        last.max().unwrap_or_default()
    }

    fn is_open(&self) -> bool {
        self.windows.last().is_some_and(|(_, end)| end.is_none())
    }

    /// Answers that came while the path was closed.
    fn strays(&self) -> Vec<u128> {
        let times = self
            .echoes
            .iter()
            .chain(&self.optional_echoes)
            .flat_map(EchoWatch::echo_times);
        let inside = |at: &u128| {
            let mut windows = self.windows.iter();
            windows.any(|(from, to)| from <= at && to.is_none_or(|to| *at <= to))
        };
        times.filter(|at| !inside(at)).collect()
    }
}

impl Flows<'_> {
    fn store_at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.sandbox.pick_address(addresses(&self.store[0])), port)
    }

    fn watch(&mut self, path: Path, sockets: BTreeSet<SocketAddr>) {
        let lab = self.env.lab;
        let clients = self.sandbox.clients();
        let each = sockets
            .iter()
            .flat_map(|socket| clients.iter().map(move |from| (from, *socket)));
        let echoes = each
            .map(|(from, socket)| lab.watch_udp(from, socket).unwrap())
            .collect();
        let probes = PathProbes {
            sockets,
            echoes,
            optional_echoes: Vec::new(),
            windows: Vec::new(),
        };
        self.paths.insert(path, probes);
    }

    async fn watch_mirrored_service(&mut self) {
        let socket = self.sandbox.service_socket("store", 9000).await;
        self.watch(Path::MirroredService, [socket].into());
    }

    /// Opens a TCP connection from the pod (client 0) or from the node (client 1), and waits for an answer.
    async fn stream(&self, client: usize, socket: SocketAddr) -> EchoWatch {
        let from = &self.sandbox.clients()[client];
        let stream = self.env.lab.watch_stream(from, socket).unwrap();
        stream.wait_for_echo_after(unix_millis()).await.unwrap();
        stream
    }

    /// Opens TCP connections through both gateways to a granted port, from the pod and from the node.
    async fn streams_through_gateways(&self) -> Vec<EchoWatch> {
        let mut all = Vec::new();
        for socket in self.env.gateway_sockets(self.sandbox, "store-headless", "stream").await {
            for client in [0, 1] {
                for _ in 0..STREAMS {
                    all.push(self.stream(client, socket).await);
                }
            }
        }
        all
    }

    /// From now on, none of these connections may get an answer, even if the path opens again.
    fn mark_ended(&mut self, streams: Vec<EchoWatch>) {
        let since = unix_millis();
        self.ended.extend(streams.into_iter().map(|stream| (stream, since)));
    }

    /// Applies a mesh. Returns the time of the kubectl call.
    async fn apply(&self, mesh: &str) -> u128 {
        let called = unix_millis();
        self.env.hub.apply(mesh).await.unwrap();
        called
    }

    async fn annotate(&self, change: &str) -> u128 {
        let called = unix_millis();
        let args = ["annotate", "--overwrite", "cmesh", MESH, "-n", NAMESPACE, change];
        self.env.hub.kubectl(args).await.unwrap();
        called
    }

    /// Names of all SandboxAccesses, Peers and PeerPolicies in the hub, and of all Peers, PeerPolicies and Services in the sandbox.
    async fn objects(&self) -> Vec<BTreeSet<String>> {
        let mut all = Vec::new();
        for kind in ["sandboxaccesses", "peers", "peerpolicies"] {
            all.push(versions(&self.env.hub, kind).await.into_keys().collect());
        }
        for kind in ["peers", "peerpolicies", "services"] {
            all.push(versions(&self.sandbox.cluster, kind).await.into_keys().collect());
        }
        all
    }

    /// Waits until the change that was made at `called` is in force: the paths in `open` answer, and no other path
    /// does. A path that was closed before and stays closed must not answer during the change, either.
    async fn wait_until_in_force(&mut self, what: &str, called: u128, open: &[Path], access: Access) {
        let reported = self.wait_until_reported(access).await;
        for path in open {
            let probes = self.paths.get_mut(path).unwrap();
            let opens_first_time = probes.windows.is_empty() && matches!(path, Path::Pod | Path::UnlistedPort);
            if !probes.is_open() {
                probes.windows.push((called, None));
            }
            probes.echoes[0].wait_for_echo_after(reported).await.unwrap();
            if opens_first_time {
                // The conntrack entry of the node's flow may be older than the route into the tunnel. Then its packets are not
                // masqueraded: they keep the node's own address, which is in no Peer's allowed IPs, and get no answer.
                let socket = *probes.sockets.first().unwrap();
                let fresh = self.env.lab.watch_udp(&self.sandbox.clients()[1], socket).unwrap();
                probes
                    .optional_echoes
                    .push(std::mem::replace(&mut probes.echoes[1], fresh));
            }
            for echo in &probes.echoes {
                echo.wait_for_echo_after(reported).await.unwrap();
            }
        }
        let opened = unix_millis();
        let closed_paths: Vec<Path> = self.paths.keys().copied().filter(|path| !open.contains(path)).collect();
        let last = || {
            closed_paths
                .iter()
                .map(|path| self.paths[path].last())
                .max()
                .unwrap_or_default()
        };
        let closed = wait_until(format!("{what}: silence"), PATIENCE, async || match last() {
            last if last + SILENCE < unix_millis() => Ok(unix_millis()),
            last => Err(format!("an answer at {last}")),
        })
        .await
        .unwrap();
        let took = last().saturating_sub(called);
        let late = last().saturating_sub(reported);
        assert!(late < CLOSE_LIMIT, "{what}: last answer {late} ms after the report");
        for path in &closed_paths {
            if let Some((_, end @ None)) = self.paths.get_mut(path).unwrap().windows.last_mut() {
                *end = Some(closed);
            }
        }
        self.probe_with_new_flows(what, open).await;
        for (path, probes) in &self.paths {
            let (strays, windows) = (probes.strays(), &probes.windows);
            assert!(
                strays.is_empty(),
                "{what}: {path:?} answered at {strays:?}, outside {windows:?}"
            );
        }
        for (stream, since) in &self.ended {
            let late: Vec<u128> = stream.echo_times().into_iter().filter(|at| at > since).collect();
            assert!(
                late.is_empty(),
                "{what}: a connection that ended by {since} answered at {late:?}"
            );
        }
        println!(
            "{what}: reported as applied after {} ms, open paths answered after {} ms, last answer of a closed path \
             after {took} ms",
            reported - called,
            opened - called
        );
    }

    /// Checks with new flows that exactly the paths in `open` answer.
    async fn probe_with_new_flows(&self, what: &str, open: &[Path]) {
        let sockets: BTreeSet<SocketAddr> = self
            .paths
            .values()
            .flat_map(|probes| &probes.sockets)
            .copied()
            .collect();
        let want = open.iter().flat_map(|path| &self.paths[path].sockets).copied();
        let want: BTreeSet<SocketAddr> = want.collect();
        let [pod, host] = self.sandbox.clients().map(async |from: TrafficClient| {
            // kube-proxy takes up to a second to apply a Service.
            wait_until(format!("{what}: {want:?} to answer {from}"), PATIENCE, async || {
                let answers = self.env.lab.scan_udp(&from, sockets.iter().copied()).await;
                let answers = answers.map_err(|error| error.to_string())?;
                assert!(answers.is_subset(&want), "{what}: {answers:?} answers {from}");
                if answers == want {
                    Ok(())
                } else {
                    Err(format!("{answers:?}"))
                }
            })
            .await
            .unwrap();
        });
        tokio::join!(pod, host);
    }

    /// Waits until PolicyEnforced is True for the current generation of the mesh, the SandboxAccess is in the state `access`, and
    /// every gateway reports the object's generation as applied (`Access::Absent`: no gateway reports the object). Returns the
    /// time at which this is so.
    async fn wait_until_reported(&self, access: Access) -> u128 {
        let hub = &self.env.hub;
        let name = format!("{MESH}--{}", self.sandbox.name());
        wait_until(format!("PolicyEnforced in {HUB}"), PATIENCE, async || {
            let mesh = json(hub, &["get", "cmesh", MESH, "-n", NAMESPACE]).await;
            let all = mesh["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let enforced = all.into_iter().find(|condition| condition["type"] == "PolicyEnforced");
            let enforced = enforced.unwrap_or_default();
            let is_enforced =
                enforced["status"] == "True" && enforced["observedGeneration"] == mesh["metadata"]["generation"];
            let list = json(hub, &["get", "sandboxaccesses"]).await;
            let list = list["items"].as_array().cloned().unwrap_or_default();
            let object_in_hub = list.into_iter().find(|object| object["metadata"]["name"] == *name);
            let actual = object_in_hub.as_ref().map_or(Access::Absent, |object| {
                let grants = object["spec"]["grants"].as_array();
                if grants.is_none_or(Vec::is_empty) {
                    Access::WithoutGrants
                } else {
                    Access::WithGrants
                }
            });
            let version = object_in_hub.map(|object| {
                (
                    text(&object["metadata"]["uid"]),
                    object["metadata"]["generation"].as_i64(),
                )
            });
            let gateways = json(hub, &["get", "sandboxgateways", "-n", GATEWAYS]).await;
            let applied = gateways["items"].as_array().unwrap().iter().map(|gateway| {
                let all = gateway["status"]["applied"].as_array().cloned().unwrap_or_default();
                let entry = all.into_iter().find(|one| one["name"] == *name);
                entry.map(|one| (text(&one["uid"]), one["generation"].as_i64()))
            });
            let applied: Vec<_> = applied.collect();
            if is_enforced && actual == access && applied.iter().all(|one| *one == version) {
                Ok(unix_millis())
            } else {
                Err(format!("{enforced}; {actual:?} {version:?}, applied {applied:?}"))
            }
        })
        .await
        .unwrap()
    }
}

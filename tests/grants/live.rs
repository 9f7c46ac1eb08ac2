//! What is open is changed while packets flow: a quarantine and every change of a profile, with a sandbox's pod and node that
//! never stop sending, to what is granted and to what is not.

use std::net::SocketAddr;

use clustermesh_lab::{Asker, Echo, MESH, NAMESPACE, wait_until};

use super::{
    HUB, NEW, OLD, PATIENCE, Side, World, grants,
    mesh::{json, state::versions},
    now,
};

/// In no Service.
const BEYOND: u16 = 9100;
/// In a granted one.
const STREAM: u16 = 8200;
/// What closes is closed within so many milliseconds of the call, on machines that do much else.
const BOUND: u128 = 30_000;
/// So many milliseconds nothing comes before it is taken for closed.
const SILENCE: u128 = 2000;

/// Flows that began while the member was a sandbox: from its pod and from its node.
struct Flows<'a> {
    world: &'a World<'a>,
    askers: [Asker; 2],
    sockets: [SocketAddr; 2],
    granted: Vec<Echo>,
    beyond: Vec<Echo>,
    /// One TCP connection from the node, over which something granted is asked.
    stream: Echo,
}

pub(super) async fn nothing_flows_beyond_what_a_quarantine_or_a_tighter_profile_leaves(
    world: &World<'_>,
    side: &Side<'_>,
) {
    let store = world.pods("store").await.remove(0);
    let node = world.lab.node(&store.node);
    let (probe, at) = (world.lab.prober().unwrap(), |port| {
        SocketAddr::new(side.of(&store), port)
    });
    let serve = |how: &str, port: u16| {
        let words = [&*probe, how, &format!(":{port}")];
        node.pod_spawn(how, store.ip, words).unwrap()
    };
    let _servers = [serve("udp-echo", BEYOND), serve("stream-serve", STREAM)];
    let askers = side.askers();
    let asks = |port| {
        askers
            .iter()
            .map(|from| world.lab.watch_udp(from, at(port)).unwrap())
            .collect()
    };
    world.lab.until_open(&askers[1], &[at(STREAM)].into()).await.unwrap();
    let flows = Flows {
        world,
        sockets: [at(9000), at(BEYOND)],
        granted: asks(9000),
        beyond: asks(BEYOND),
        stream: world.lab.watch_stream(&askers[1], at(STREAM)).unwrap(),
        askers,
    };
    let sandbox = mesh(world, "sandbox");
    flows.opened("at the start", now(), &flows.granted).await;
    flows.closed("a sandbox", 0, &[], &flows.beyond).await;

    let stands = async || (names(world, "peers").await, names(world, "peerpolicies").await);
    let before = stands().await;
    let called = flows.apply(&quarantined(&sandbox)).await;
    flows
        .closed("quarantine of a sandbox", called, &flows.granted, &flows.beyond)
        .await;
    assert_eq!(stands().await, before, "its objects are kept");
    let called = flows.apply(&sandbox).await;
    flows.opened("its end", called, &flows.granted).await;

    let called = flows.annotate(&format!("kilo-clustermesh.io/quarantine={OLD}")).await;
    flows
        .closed("quarantine by annotation", called, &flows.granted, &flows.beyond)
        .await;
    let called = flows.annotate("kilo-clustermesh.io/quarantine-").await;
    flows.opened("its end", called, &flows.granted).await;

    let wide = mesh(world, "cluster-meshed");
    let called = flows.apply(&wide).await;
    flows.opened("sandbox to cluster-meshed", called, flows.all()).await;
    let called = flows.apply(&quarantined(&wide)).await;
    flows
        .closed("quarantine of a trusted member", called, flows.all(), &[])
        .await;
    let called = flows.apply(&wide).await;
    flows.opened("its end", called, flows.all()).await;

    let called = flows.apply(&sandbox).await;
    let closed = flows
        .closed("cluster-meshed to sandbox", called, &flows.beyond, &[])
        .await;
    flows.opened("what is granted still", closed, &flows.granted).await;
    let called = flows.apply(&mesh(world, "standard")).await;
    flows
        .closed("sandbox to standard", called, &flows.granted, &flows.beyond)
        .await;
    let called = flows.apply(&wide).await;
    flows.opened("standard to cluster-meshed", called, flows.all()).await;
    let called = flows.apply(&mesh(world, "standard")).await;
    flows
        .closed("cluster-meshed to standard", called, flows.all(), &[])
        .await;
    let called = flows.apply(&sandbox).await;
    flows.opened("standard to sandbox", called, &flows.granted).await;
    flows.closed("standard to sandbox", called, &[], &flows.beyond).await;
}

/// The mesh with this profile of the older sandbox.
fn mesh(world: &World<'_>, profile: &str) -> String {
    let grants = grants(true);
    let of_both: &[&str] = if profile == "cluster-meshed" {
        &[NEW]
    } else {
        &[OLD, NEW]
    };
    let text = world.product.mesh_with(of_both, &[(OLD, &grants), (NEW, &grants)]);
    match profile {
        // The older one stands first.
        "standard" => text.replacen("isolationProfile: sandbox", "isolationProfile: standard", 1),
        _ => text,
    }
}

fn quarantined(mesh: &str) -> String {
    let entry = format!("- name: {OLD}\n");
    mesh.replacen(&entry, &format!("{entry}    quarantine: true\n"), 1)
}

/// Of all objects of a kind in the hub.
async fn names(world: &World<'_>, kind: &str) -> Vec<String> {
    versions(&world.hub, kind).await.into_keys().collect()
}

impl Flows<'_> {
    fn all(&self) -> impl Iterator<Item = &Echo> {
        self.granted.iter().chain(&self.beyond)
    }

    /// Returns when that was called.
    async fn apply(&self, mesh: &str) -> u128 {
        let called = now();
        self.world.hub.apply(mesh).await.unwrap();
        called
    }

    async fn annotate(&self, change: &str) -> u128 {
        let called = now();
        let words = ["annotate", "--overwrite", "cmesh", MESH, "-n", NAMESPACE, change];
        self.world.hub.kubectl(words).await.unwrap();
        called
    }

    async fn opened<'f>(&self, what: &str, called: u128, flows: impl IntoIterator<Item = &'f Echo>) {
        let mut first = 0;
        for flow in flows {
            first = first.max(flow.answered_after(called).await.unwrap());
        }
        // It outlived whatever came between.
        self.stream.answered_after(now()).await.unwrap();
        println!(
            "{what}: everything answers {} ms after it was asked for",
            first - called.min(first)
        );
    }

    /// Waits until the mesh says that it is closed and nothing comes from what was open any more, asks anew, and returns since
    /// when. What the mesh says is what stands at the API servers: their agents need a moment more. What was not `open` answers
    /// nothing from the call on.
    async fn closed<'f>(
        &self,
        what: &str,
        called: u128,
        open: impl IntoIterator<Item = &'f Echo>,
        shut: impl IntoIterator<Item = &'f Echo>,
    ) -> u128 {
        let (open, shut): (Vec<&Echo>, Vec<&Echo>) = (open.into_iter().collect(), shut.into_iter().collect());
        let told = self.told().await;
        let last = || {
            open.iter()
                .filter_map(|flow| flow.answers().pop())
                .max()
                .unwrap_or_default()
        };
        let closed = wait_until(format!("{what}: silence"), PATIENCE, async || match last() {
            last if last + SILENCE < now() => Ok(now()),
            last => Err(format!("an answer at {last}")),
        })
        .await
        .unwrap();
        let before = last();
        for from in &self.askers {
            let answers = self.world.lab.scan_udp(from, self.sockets).await.unwrap();
            let granted = !open
                .iter()
                .chain(&shut)
                .any(|flow| self.granted.iter().any(|one| std::ptr::eq(one, *flow)));
            let want = self
                .sockets
                .into_iter()
                .filter(|socket| granted && socket.port() != BEYOND);
            assert!(answers.is_subset(&want.collect()), "{what}: {answers:?} answers {from}");
        }
        assert_eq!(last(), before, "{what}: something came after {closed}");
        let took = before.saturating_sub(called);
        assert!(took < BOUND, "{what}: last answer {took} ms after it was asked for");
        let beyond: Vec<u128> = shut
            .iter()
            .flat_map(|flow| flow.answers())
            .filter(|at| *at > called)
            .collect();
        assert_eq!(
            beyond,
            Vec::<u128>::new(),
            "{what}: answers beyond the grants, asked for at {called}"
        );
        println!(
            "{what}: last answer {took} ms after it was asked for; the mesh said so after {} ms",
            told.saturating_sub(called)
        );
        closed
    }

    /// When the mesh's status is that of what was applied last, and nothing is left open.
    async fn told(&self) -> u128 {
        wait_until(format!("PolicyEnforced in {HUB}"), PATIENCE, async || {
            let mesh = json(&self.world.hub, &["get", "cmesh", MESH, "-n", NAMESPACE]).await;
            let all = mesh["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let enforced = all.into_iter().find(|condition| condition["type"] == "PolicyEnforced");
            match enforced {
                Some(enforced)
                    if enforced["status"] == "True"
                        && enforced["observedGeneration"] == mesh["metadata"]["generation"] =>
                {
                    Ok(now())
                }
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap()
    }
}

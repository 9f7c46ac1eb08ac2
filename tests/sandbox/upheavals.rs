//! What is closed to a sandbox stays closed whatever happens in the cluster that serves it: everything is scanned without a
//! pause, through one node there, while its agent, its table, the objects that it lives by and the node itself go and come.

use std::{collections::BTreeSet, net::SocketAddr};

use clustermesh_lab::{AGENT_NAMESPACE, Attacker, NAMESPACE, Node, Watch, wait_until};
use nix::sys::signal::Signal;

use super::{
    SANDBOX, World,
    mesh::{PATIENCE, json},
};

/// How often a table is deleted.
const TIMES: usize = 15;

/// The node that is struck, and who looks on.
pub(super) struct Scene<'a> {
    world: &'a World<'a>,
    pub(super) node: Node<'a>,
    /// What is granted of it.
    pub(super) granted: BTreeSet<SocketAddr>,
    all: BTreeSet<SocketAddr>,
    watches: Vec<Watch>,
}

/// Returns the scene as it stands then.
pub(super) async fn nothing_more_opens_while_agents_tables_objects_and_nodes_go_and_come<'a>(
    world: &'a World<'a>,
    attacker: &Attacker<'_>,
) -> Scene<'a> {
    let peer = attacker.peers.last().unwrap();
    let name = Attacker::node_of(peer);
    let scene = Scene::new(world, name).await;
    scene.settled("at the start").await;

    let old = scene.node.pids_of("wg-agent").unwrap();
    scene.node.signal("wg-agent", Signal::SIGKILL).unwrap();
    scene.another_agent(&old).await;
    scene.settled("after SIGKILL of the agent").await;

    let restart = ["-n", AGENT_NAMESPACE, "rollout", "restart", "daemonset/wg-agent"];
    world.hub.kubectl(restart).await.unwrap();
    world.hub.rollout(AGENT_NAMESPACE, "daemonset/wg-agent").await.unwrap();
    scene.settled("after an upgrade of the agents").await;

    let flush = ["nft", "flush", "table", "inet", "clustermesh"];
    scene.node.exec(flush).await.unwrap();
    scene.settled("after nft flush table").await;
    let delete = ["nft", "delete", "table", "inet", "clustermesh"];
    // A moment is short, and a scan asks once a second.
    for _ in 0..TIMES {
        wait_until("the table", PATIENCE, async || {
            let deleted = scene.node.try_exec(delete).await.map_err(|error| error.to_string())?;
            if deleted.status.success() {
                Ok(())
            } else {
                Err(deleted.stderr)
            }
        })
        .await
        .unwrap();
    }
    scene
        .settled(&format!("after nft delete table, {TIMES} times over"))
        .await;

    // What came meanwhile is on its way before the agent hears of it.
    scene.node.signal("wg-agent", Signal::SIGSTOP).unwrap();
    scene.node.exec(delete).await.unwrap();
    scene.round().await;
    scene.node.signal("wg-agent", Signal::SIGCONT).unwrap();
    scene
        .settled("after nft delete table beside an agent that stood still")
        .await;

    let scale =
        |replicas: &str| ["-n", NAMESPACE, "scale", "deployment/clustermesh-controller", replicas].map(str::to_owned);
    world.hub.kubectl(scale("--replicas=0")).await.unwrap();
    let gone = [
        "-n",
        NAMESPACE,
        "wait",
        "--for=delete",
        "pod",
        "-l",
        "app.kubernetes.io/name=clustermesh-controller",
        "--timeout=60s",
    ];
    world.hub.kubectl(gone).await.unwrap();
    let policy = format!("{}--{SANDBOX}", clustermesh_lab::MESH);
    let wide = r#"{"spec": {"isolationProfile": null, "allow": [{"to": ["0.0.0.0/0"]}]}}"#;
    let widen = ["patch", "peerpolicy", &policy, "--type=merge", "-p", wide];
    let refused = world.hub.try_kubectl(widen).await.unwrap();
    assert!(refused.stderr.contains("ValidatingAdmissionPolicy"), "{refused:?}");
    // Where deploy/admission.yaml is not applied.
    let admission = ["delete", "validatingadmissionpolicybinding", "clustermesh-objects"];
    world.hub.kubectl(admission).await.unwrap();
    wait_until("the policy to be widened by hand", PATIENCE, async || {
        let widened = world.hub.try_kubectl(widen).await.map_err(|error| error.to_string())?;
        if widened.status.success() {
            Ok(())
        } else {
            Err(widened.stderr)
        }
    })
    .await
    .unwrap();
    scene.round().await;
    world.hub.kubectl(["delete", "peerpolicy", &policy]).await.unwrap();
    scene.round().await;
    // The next controller asks at once. What follows takes all grants away, and gives them again.
    attacker.lets_read().await.unwrap();
    world.hub.kubectl(scale("--replicas=1")).await.unwrap();
    world
        .hub
        .rollout(NAMESPACE, "deployment/clustermesh-controller")
        .await
        .unwrap();
    scene
        .settled("after a policy that was widened and deleted by hand, without a controller")
        .await;

    let old = scene.node.pids_of("wg-agent").unwrap();
    world.hub.kill_api().unwrap();
    scene.node.signal("wg-agent", Signal::SIGKILL).unwrap();
    scene.another_agent(&old).await;
    scene.round().await;
    world.hub.start_api().await.unwrap();
    scene
        .settled("after a start of the agent while its API server was away")
        .await;

    scene.node.power_cut().await.unwrap();
    scene.node.power_on().await.unwrap();
    world.hub.rollout("default", "deployment/web").await.unwrap();
    let key = wait_until("the node's new key", PATIENCE, async || {
        let node = json(&world.hub, &["get", "node", name]).await;
        let key = node["metadata"]["annotations"]["kilo.squat.ai/key"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let peers = json(&world.sandbox, &["get", "peer", peer]).await;
        if key.is_empty() || peers["spec"]["publicKey"] == key {
            Err(key)
        } else {
            Ok(key)
        }
    })
    .await
    .unwrap();
    // Its pods have other addresses, and it has another key.
    scene.nothing_but_what_was_granted();
    attacker.follows(peer, &key).await.unwrap();
    let all = world
        .sandbox
        .sockets_beyond(&[&world.hub, &world.member], &granted(world).await)
        .await
        .unwrap();
    let addresses = all.keys().map(SocketAddr::ip).collect();
    let left = attacker.leads_through(peer, &addresses).await.unwrap();
    assert_eq!(left, BTreeSet::new());
    let scene = Scene::new(world, name).await;
    scene.settled("after the node was started anew").await;
    scene
}

async fn granted(world: &World<'_>) -> BTreeSet<SocketAddr> {
    let webs = world.hub.webs().await.unwrap();
    webs.iter().map(|web| SocketAddr::new(web.ip, 8080)).collect()
}

impl<'a> Scene<'a> {
    /// Looks on from the sandbox's pod and from its node.
    async fn new(world: &'a World<'a>, node: &str) -> Self {
        let granted = granted(world).await;
        let all = world
            .sandbox
            .sockets_beyond(&[&world.hub, &world.member], &granted)
            .await
            .unwrap();
        println!("{} sockets, without a pause", all.len());
        let watch = |from| world.lab.scan_on(&from, all.keys().copied()).unwrap();
        let webs = world.hub.webs().await.unwrap();
        let here = webs.iter().filter(|web| web.node == node);
        Self {
            world,
            node: world.lab.node(node),
            granted: here.map(|web| SocketAddr::new(web.ip, 8080)).collect(),
            all: all.keys().copied().collect(),
            watches: world.askers().map(watch).into(),
        }
    }

    async fn another_agent(&self, old: &[i32]) {
        wait_until("another agent", PATIENCE, async || {
            match self.node.pids_of("wg-agent").map_err(|error| error.to_string())? {
                now if now.is_empty() || now == old => Err(format!("{now:?}, was {old:?}")),
                _ => Ok(()),
            }
        })
        .await
        .unwrap();
    }

    /// Everything is asked once more.
    pub(super) async fn round(&self) {
        for watch in &self.watches {
            watch.another_round().await.unwrap();
        }
        self.nothing_but_what_was_granted();
    }

    fn nothing_but_what_was_granted(&self) {
        for watch in &self.watches {
            let opened = watch.opened();
            assert!(
                opened.is_subset(&self.granted),
                "{opened:?}, granted {:?}",
                self.granted
            );
        }
    }

    /// Nobody finds anything at all, what was granted before included: by scans of their own, since those that go on may have
    /// seen it while it was granted.
    pub(super) async fn nothing_answers(&self, when: &str) {
        let found = self.world.found(self.all.iter().copied()).await;
        assert_eq!(found, [BTreeSet::new(), BTreeSet::new()], "{when}");
        println!("{when}: none of {} sockets answers", self.all.len());
    }

    /// What is granted answers again, and nothing else has answered all the while.
    pub(super) async fn settled(&self, when: &str) {
        for from in self.world.askers() {
            let open = self.world.lab.until_open(&from, &self.granted).await;
            open.unwrap_or_else(|error| panic!("{when}: {error}"));
        }
        self.round().await;
        println!("{when}: {:?} and nothing else answered", self.watches[0].opened());
    }
}

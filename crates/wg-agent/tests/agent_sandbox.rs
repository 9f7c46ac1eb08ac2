//! A sandbox's packets against a real agent: an attacker with WireGuard of its own sends without a pause, over IPv4 and IPv6,
//! what is granted to it and everything that is not, while agents and API servers come and go and objects change. Witnesses in
//! the pods, on the node and at the attacker's count what passes. Needs root.

#[allow(unreachable_pub, reason = "shared between test binaries")]
mod attacked;
mod attacker;
mod netns;
mod node;

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use attacked::{
    ATTACKER, DB, SPARE, Stage, TCP_PORT, ip,
    objects::{PEER, POLICY, attackers_key, policy, slice},
};
use attacker::{
    Work, public,
    witness::{At, Witness},
};
use clustermesh_agent_core::{
    device::{PeerChange, PeerSpec},
    numbers::MARK_UNDERLAY,
};
use clustermesh_api::{names::PEER_REQUIRES_POLICY, policy::PeerPolicy};
use clustermesh_lab::wait_until;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use netns::NetNs;
use node::SOON;
use wg_agent::device::{Configuration, Device, userspace::Userspace};
use x25519_dalek::StaticSecret;

#[tokio::test]
async fn a_sandbox_gets_what_is_granted_and_never_a_packet_more_whatever_happens() {
    let mut stage = Stage::start().await;
    stage.answered("the first start").await;
    stage.exactly("the first start").await;

    agents_come_and_go(&mut stage).await;
    the_node_starts_while_its_api_server_is_away(&mut stage).await;
    a_setting_of_the_lock_is_not_to_be_had(&mut stage).await;
    an_api_server_that_goes_away_changes_nothing(&mut stage).await;
    the_policy_is_another_or_none(&mut stage).await;
    the_peer_asks_for_another_policy_or_none(&mut stage).await;
    the_endpoint_moves_goes_and_drains(&mut stage).await;
    the_attacker_calls_itself_otherwise(&mut stage).await;
    an_agent_dies_at_any_moment(&mut stage).await;
    the_grants_of_a_dead_agent_go(&mut stage).await;
    another_hand_takes_the_tables_away(&mut stage).await;

    assert_eq!(stage.unsent(), BTreeMap::new());
}

async fn agents_come_and_go(stage: &mut Stage) {
    stage.killed().await;
    stage.flood.more(20).await;
    stage.started(&[]);
    stage.answered("killed, and started again").await;
    stage.exactly("SIGKILL").await;

    stage.stopped().await;
    stage.flood.more(20).await;
    stage.started(&[]);
    stage.answered("stopped, and started again").await;
    stage.exactly("SIGTERM").await;

    // Another file, started as soon as the old one has let go.
    let files = tempfile::tempdir().expect("a directory");
    let newer = files.path().join("wg-agent");
    std::fs::copy(node::AGENT, &newer).expect("copy the program");
    stage.stopped().await;
    let mut words = stage.world.command(stage.mgmt(), &[]);
    words[0] = newer.display().to_string();
    stage.agent = stage
        .world
        .host(stage.mgmt())
        .spawn("newer", words)
        .expect("start the newer one");
    stage.answered("upgraded").await;
    stage.exactly("an upgrade").await;
}

/// What a boot leaves: the files, and nothing in the kernel. The cache knows no Peer of a sandbox.
async fn the_node_starts_while_its_api_server_is_away(stage: &mut Stage) {
    stage.killed().await;
    let interface = stage.mgmt().interface.clone();
    stage.node.ip(&format!("link del {interface}"));
    stage.flushed();
    stage.node.sh("for f in -4 -6; do
            ip $f rule flush protocol 117
            ip $f route flush table 5182; ip $f route flush table 5183
        done");
    stage.api_goes();
    stage.started(&[]);
    wait_until("the agent to work from its cache", SOON, async || {
        match stage.world.page(stage.mgmt(), "/readyz").await {
            (_, text) if text.contains("cache: the API server has not told yet") => Ok(()),
            (code, text) => Err(format!("{code}: {text}")),
        }
    })
    .await
    .expect("the cache");
    stage.closed("a boot without the API server").await;
    let peers = stage.node.run("wg", &["show", &interface, "peers"]);
    assert!(!peers.contains(&public(&attackers_key()).to_string()), "{peers}");
    stage.api_comes().await;
    stage.answered("the API server is back").await;
    stage.exactly("a boot").await;
}

/// A kernel that is said not to look at where packets come from, whatever is written: without a table it would take a sandbox's.
async fn a_setting_of_the_lock_is_not_to_be_had(stage: &mut Stage) {
    stage.killed().await;
    let mut zero = tempfile::NamedTempFile::new().expect("a file");
    zero.write_all(b"0").expect("write");
    let setting = format!("/proc/sys/net/ipv4/conf/{}/rp_filter", stage.mgmt().interface);
    let script = format!(
        "mount --bind {} {setting}; mount -o remount,ro,bind {setting}; exec \"$@\"",
        zero.path().display()
    );
    let mut words = ["unshare", "--mount", "sh", "-ec", &script, "sh"]
        .map(String::from)
        .to_vec();
    words.extend(stage.world.command(stage.mgmt(), &[]));
    stage.agent = stage
        .world
        .host(stage.mgmt())
        .spawn("unlocked", words)
        .expect("start the agent");
    let told = "peers that require a policy stay out of the device: net.ipv4.conf.";
    wait_until("the agent to say so", SOON, async || {
        let log = stage.agent.log();
        if log.contains(told) { Ok(()) } else { Err(log) }
    })
    .await
    .expect("told");
    stage.closed("a setting that cannot be written").await;
    stage.killed().await;
    stage.started(&[]);
    stage.answered("the setting is to be had").await;
    stage.exactly("a setting that could not be written").await;
}

async fn an_api_server_that_goes_away_changes_nothing(stage: &mut Stage) {
    stage.api_goes();
    stage.answered("without an API server").await;
    stage.api_comes().await;
    stage.answered("the API server is back").await;
    stage.exactly("an API server that went away").await;
}

async fn the_policy_is_another_or_none(stage: &mut Stage) {
    let policies = stage.world.policies(stage.mgmt()).await;
    let say = async |service: &str| {
        let patch = serde_json::json!({"spec": {"allow": policy(service).allow}});
        let patch = Patch::Merge(&patch);
        policies
            .patch(POLICY, &PatchParams::default(), &patch)
            .await
            .expect("patch the PeerPolicy");
    };
    let left = stage.left();
    say("other").await;
    stage.closed("a PeerPolicy that names another Service, by hand").await;
    say("db").await;
    stage.answered("the PeerPolicy is as it was").await;
    assert_eq!(stage.left(), left, "its session is no business of its policy's");
    stage.exactly("a PeerPolicy changed by hand").await;

    policies
        .delete(POLICY, &DeleteParams::default())
        .await
        .expect("delete the PeerPolicy");
    stage.closed("no PeerPolicy").await;
    policies
        .create(&PostParams::default(), &PeerPolicy::new(POLICY, policy("db")))
        .await
        .expect("create the PeerPolicy");
    stage.answered("the PeerPolicy is made again").await;
    stage.exactly("a PeerPolicy deleted and made again").await;
}

async fn the_peer_asks_for_another_policy_or_none(stage: &mut Stage) {
    let peers = stage.world.peers(stage.mgmt()).await;
    let policies = stage.world.policies(stage.mgmt()).await;
    let ask = async |required: serde_json::Value| {
        let patch = serde_json::json!({"metadata": {"annotations": {PEER_REQUIRES_POLICY: required}}});
        peers
            .patch(PEER, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .expect("patch the Peer");
    };
    let real = format!("{POLICY}@{}", policy("db").revision());
    let left = stage.left();
    ask(format!("{POLICY}@0123456789abcdef").into()).await;
    stage.closed("a Peer that asks for another revision").await;
    ask(real.clone().into()).await;
    stage.answered("the Peer asks for its policy again").await;
    stage.exactly("a Peer that asks for another revision").await;
    assert_eq!(stage.left(), left);
    for (wrong, what) in [
        (serde_json::Value::Null, "a Peer that asks for no policy"),
        ("mesh--tenant-b@".into(), "a Peer that asks for a wider policy"),
    ] {
        ask(wrong).await;
        stage.closed(what).await;
        ask(real.clone().into()).await;
        stage.answered("the Peer asks for its policy again").await;
        stage.exactly(what).await;
    }
    // Both: a Peer like a trusted member's, to whom nothing is allowed.
    ask(serde_json::Value::Null).await;
    policies
        .delete(POLICY, &DeleteParams::default())
        .await
        .expect("delete the PeerPolicy");
    stage.closed("a Peer that asks for no policy, and none is there").await;
    policies
        .create(&PostParams::default(), &PeerPolicy::new(POLICY, policy("db")))
        .await
        .expect("create the PeerPolicy");
    ask(real.into()).await;
    stage.answered("both are as they were").await;
    stage.exactly("neither a policy nor a Peer that asks for it").await;
}

/// Nobody writes for the controller here: agents read the slices themselves.
async fn the_endpoint_moves_goes_and_drains(stage: &mut Stage) {
    for (family, spare) in SPARE.iter().enumerate() {
        stage.endpoint(family, spare, false).await;
    }
    stage.only_moved("an endpoint that moved").await;
    for (family, db) in DB.iter().enumerate() {
        stage.endpoint(family, db, false).await;
    }
    stage.answered("the endpoint is back").await;
    stage.exactly_after_a_move("an endpoint that moved and came back").await;

    let slices = stage.slices().await;
    for name in ["db-4", "db-6"] {
        slices
            .delete(name, &DeleteParams::default())
            .await
            .expect("delete a slice");
    }
    stage.closed("no EndpointSlice").await;
    for (family, db) in DB.iter().enumerate() {
        let anew = slice("db", family, db, false);
        slices
            .create(&PostParams::default(), &anew)
            .await
            .expect("create a slice");
    }
    stage.answered("the slices are back").await;
    stage.exactly("EndpointSlices deleted and made again").await;

    // A connection that is open stays so, and no new one comes.
    let db = SocketAddr::new(ip(DB[0]), TCP_PORT);
    let connect = || {
        stage
            .attackers
            .enter(|| TcpStream::connect_timeout(&db, Duration::from_secs(1)))
    };
    let open = wait_until("a connection", SOON, async || {
        connect().map_err(|error| error.to_string())
    });
    let mut open = open.await.expect("a connection");
    open.set_read_timeout(Some(SOON)).expect("a timeout");
    stage.endpoint(0, DB[0], true).await;
    wait_until("new connections to fail", SOON, async || match connect() {
        Err(_) => Ok(()),
        Ok(_) => Err("still taken".to_owned()),
    })
    .await
    .expect("draining");
    let mut byte = [0];
    open.write_all(b"!").expect("write");
    open.read_exact(&mut byte).expect("an open connection goes on");
    assert_eq!(byte, *b"!");
    stage.endpoint(0, DB[0], false).await;
    stage.answered("the endpoint does not end after all").await;
    stage.exactly("an endpoint that drained").await;
}

async fn the_attacker_calls_itself_otherwise(stage: &mut Stage) {
    stage.attacker.take_key(StaticSecret::from([79; 32]));
    stage.closed("a key that no Peer names").await;
    stage.attacker.take_key(attackers_key());
    stage.answered("its own key").await;
    stage.exactly("another key").await;
}

/// The tunnel of a dead agent in the stead of one in the kernel, which goes on without it: the same key, port and interface, and the
/// attacker's peer as the agent had it.
fn goes_on(stage: &Stage) -> Userspace {
    let configuration = Configuration {
        private_key: stage.key(),
        listen_port: 51820,
        fwmark: MARK_UNDERLAY,
        mtu: 1420,
    };
    let interface = &stage.mgmt().interface;
    let device = stage.node.enter(|| Userspace::open(interface, &configuration));
    let mut device = device.expect("take the interface over");
    let [v4, v6] = ATTACKER.map(|address| ipnet::IpNet::from(ip(address)));
    let spec = PeerSpec {
        allowed_ips: [v4, v6].into(),
        ..PeerSpec::default()
    };
    let peers = [PeerChange::Add(public(&attackers_key()), spec)];
    device.apply(&peers).expect("add a peer");
    device
}

/// What somebody changes while an agent is about to die.
#[derive(Clone, Copy)]
enum Change {
    /// The granted endpoints are at their next place.
    Endpoint,
    /// The PeerPolicy names another Service, and the Peer still the revision that grants this one.
    Policy,
    /// The Peer asks for a revision that nobody has seen.
    Peer,
}

impl Change {
    /// Written, or taken back.
    async fn make(self, stage: &Stage, back: bool) {
        let params = PatchParams::default();
        match self {
            Self::Endpoint => {
                let places = if back { DB } else { SPARE };
                for (family, at) in places.iter().enumerate() {
                    stage.endpoint(family, at, false).await;
                }
            }
            Self::Policy => {
                let service = if back { "db" } else { "other" };
                let patch = serde_json::json!({"spec": {"allow": policy(service).allow}});
                let policies = stage.world.policies(stage.mgmt()).await;
                let patched = policies.patch(POLICY, &params, &Patch::Merge(&patch)).await;
                patched.expect("patch the PeerPolicy");
            }
            Self::Peer => {
                let known = policy("db").revision();
                let revision = if back { &*known } else { "0123456789abcdef" };
                let required = format!("{POLICY}@{revision}");
                let patch = serde_json::json!({"metadata": {"annotations": {PEER_REQUIRES_POLICY: required}}});
                let peers = stage.world.peers(stage.mgmt()).await;
                let patched = peers.patch(PEER, &params, &Patch::Merge(&patch)).await;
                patched.expect("patch the Peer");
            }
        }
    }
}

/// SIGKILL after each kind of change, some milliseconds later, and once more as many before the next one has been up for 300:
/// before, in the midst of and after whatever an agent does about a change, or at its start. The tunnel of the first lives on, as
/// one in the kernel would; none of the changes takes its peer out.
async fn an_agent_dies_at_any_moment(stage: &mut Stage) {
    let rounds = [
        (0, Change::Endpoint),
        (30, Change::Policy),
        (50, Change::Endpoint),
        (75, Change::Peer),
        (120, Change::Policy),
        (180, Change::Endpoint),
        (300, Change::Peer),
    ];
    for (moment, change) in rounds {
        change.make(stage, false).await;
        // Nothing is waited for: any moment will do.
        tokio::time::sleep(Duration::from_millis(moment)).await;
        stage.killed().await;
        let tunnel = goes_on(stage);
        let session = async || {
            let observed = tunnel.observe().map_err(|error| error.to_string())?;
            let peer = observed.peers.get(&public(&attackers_key()));
            let age = peer.and_then(|peer| peer.stats.handshake_age);
            age.map(drop).ok_or_else(|| format!("{peer:?}"))
        };
        wait_until("a session of the tunnel that goes on", SOON, session)
            .await
            .expect("a session");
        stage.flood.more(10).await;
        drop(tunnel);
        stage.started(&[]);
        change.make(stage, true).await;
        tokio::time::sleep(Duration::from_millis(300 - moment)).await;
        stage.killed().await;
        stage.started(&[]);
        stage
            .sandbox_answered(&format!("killed {moment} ms after a change"))
            .await;
    }
    stage.answered("killed at any moment").await;
    stage.exactly_after_a_move("SIGKILL at any moment").await;
}

async fn the_grants_of_a_dead_agent_go(stage: &mut Stage) {
    stage.stopped().await;
    stage.started(&["--grant-timeout=20s"]);
    stage.answered("grants of twenty seconds").await;
    stage.killed().await;
    let tunnel = goes_on(stage);
    stage.sandbox_answered("the agent is dead, and the tunnel is not").await;
    stage.exactly_but_for_the_member("a tunnel without its agent").await;
    stage.closed("the grants of a dead agent").await;
    drop(tunnel);
    stage.started(&[]);
    stage.answered("an agent again").await;
    stage.exactly("grants that went by themselves").await;
}

/// Between the other hand and the agent's own lies a moment in which no table stands; with a dead agent it lasts. Routing is shut then.
async fn another_hand_takes_the_tables_away(stage: &mut Stage) {
    for how in ["flush ruleset", "delete table inet clustermesh"] {
        take_away(stage, how);
        wait_until("the table to be written again", SOON, async || {
            let listed = stage.node.output("nft", &["list", "table", "inet", "clustermesh"]);
            if listed.status.success() {
                Ok(())
            } else {
                Err(stage.agent.log())
            }
        })
        .await
        .expect("the agent hears of it");
        stage.answered("the table is back").await;
        stage.locked(how);
        stage.exactly(&format!("after {how}")).await;
    }
    stage.killed().await;
    let tunnel = goes_on(stage);
    stage.sandbox_answered("the agent is dead, and the tunnel is not").await;
    stage
        .exactly_but_for_the_member("a tunnel without its agent, again")
        .await;
    take_away(stage, "flush ruleset");
    stage.flood.more(50).await;
    stage.locked("flush ruleset beside a dead agent");
    drop(tunnel);
    stage.started(&[]);
    stage.answered("an agent again").await;
    stage.locked("until an agent is there");
    stage.exactly("after flush ruleset beside a dead agent").await;
}

fn take_away(stage: &Stage, how: &str) {
    match how {
        "flush ruleset" => stage.flushed(),
        _ => stage.node.nft(how),
    }
}

/// Of what stands around the test above: a packet that is counted twice would be one beyond the grants.
#[test]
fn a_witness_counts_a_packet_once_while_the_kernel_counts_more() {
    let ns = NetNs::new("loopback");
    let mut witness = Witness::new("loopback", NetNs::at("loopback", ns.path().as_ref()), At::Arrival, "lo");
    let _sender = Work::start(&ns, |stop| {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        for port in 1..u16::MAX {
            if stop.load(Ordering::Acquire) {
                return;
            }
            // Who hears nothing may say so.
            let _ = socket.send_to(b"?", ("127.0.0.1", port));
            if port % 4 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let mut seen = 0;
    while seen < 5000 {
        let news = witness.news();
        let twice: Vec<_> = news
            .iter()
            .filter(|(key, count)| key.contains(" udp ") && **count > 1)
            .collect();
        assert!(twice.is_empty(), "sent once: {twice:?}");
        seen += news.len();
    }
}

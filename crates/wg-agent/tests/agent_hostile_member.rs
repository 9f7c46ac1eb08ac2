//! A cluster-meshed member's packets against a real agent: root of the member's node sends without a pause, over IPv4 and IPv6, what
//! is open to it and everything that is not, while agents and API servers come and go. Witnesses in the pods, around the node and
//! at the member's count what passes. Needs root.

#[allow(unreachable_pub, reason = "shared between test binaries")]
mod attacked;
mod attacker;
mod netns;
mod node;

use std::{collections::BTreeMap, net::UdpSocket, sync::atomic::Ordering, thread, time::Duration};

use attacked::Stage;
use attacker::{
    Work,
    witness::{At, Witness},
};
use clustermesh_lab::wait_until;
use netns::NetNs;
use node::SOON;

// threat: forged-icmp-error, hostile-member-root
#[tokio::test]
async fn hostile_member_reaches_only_what_is_open_to_it() {
    let mut stage = Stage::start().await;
    stage.answered("the first start").await;
    stage.exactly("the first start").await;

    agent_restarts_change_nothing(&mut stage).await;
    unavailable_api_server_changes_nothing(&mut stage).await;
    deleted_tables_are_restored(&mut stage).await;

    assert_eq!(stage.unsent(), BTreeMap::new());
}

async fn agent_restarts_change_nothing(stage: &mut Stage) {
    stage.killed().await;
    stage.flood.more(20).await;
    stage.started();
    stage.answered("killed, and started again").await;
    stage.exactly("SIGKILL").await;

    stage.stopped().await;
    stage.flood.more(20).await;
    stage.started();
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

async fn unavailable_api_server_changes_nothing(stage: &mut Stage) {
    stage.api_goes();
    stage.answered("without an API server").await;
    stage.exactly("without an API server").await;
    stage.killed().await;
    stage.started();
    stage.answered("an agent that started from its cache").await;
    stage.exactly("an agent that started from its cache").await;
    stage.api_comes().await;
    stage.answered("the API server is back").await;
    stage.exactly("an API server that went away").await;
}

/// What passes in the moment in which no table stands is not looked at: for a member nothing but the table stands between.
async fn deleted_tables_are_restored(stage: &mut Stage) {
    for how in ["flush ruleset", "delete table inet clustermesh"] {
        match how {
            "flush ruleset" => stage.flushed(),
            _ => stage.node.nft(how),
        }
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
        stage.forget();
        stage.exactly(&format!("after {how}")).await;
    }
}

/// Of what stands around the test above: a packet that is counted twice would be one beyond what is open.
#[test]
fn witness_counts_each_packet_once_while_its_set_grows() {
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

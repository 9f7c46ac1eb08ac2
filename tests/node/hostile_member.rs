//! Tests that a real agent on a target node drops the forbidden packets of a cluster-meshed member. The attacker is root on
//! a node of the member, and floods allowed and forbidden packets over IPv4 and IPv6 while the agent and its API server stop
//! and start. Witnesses (packet counters) are in the target's pods, on the target node, on the machines around the target
//! node, and on the member's node. Needs root.

mod testbed;

use std::{collections::BTreeMap, net::UdpSocket, sync::atomic::Ordering, thread, time::Duration};

use clustermesh_lab::wait_until;
use clustermesh_tests::{
    agent::agent_program,
    attacker::{
        BackgroundThread,
        witness::{CountingPoint, Witness},
    },
    netns::NetNs,
};

use crate::two_clusters::TIMEOUT;
use testbed::Testbed;

// threat: forged-icmp-error, hostile-member-root
#[tokio::test]
async fn hostile_member_reaches_only_allowed_destinations() {
    let mut testbed = Testbed::start().await;
    testbed.wait_for_answers("the first start").await;
    testbed.assert_only_allowed_traffic("the first start").await;

    agent_restarts_change_nothing(&mut testbed).await;
    unavailable_api_server_changes_nothing(&mut testbed).await;
    deleted_tables_are_restored(&mut testbed).await;

    assert_eq!(
        testbed.unsent(),
        BTreeMap::new(),
        "the attacker's own kernel refused to send packets"
    );
}

async fn agent_restarts_change_nothing(testbed: &mut Testbed) {
    testbed.kill_agent().await;
    testbed.flood.wait_for_rounds(20).await;
    testbed.start_agent();
    testbed.wait_for_answers("killed, and started again").await;
    testbed.assert_only_allowed_traffic("SIGKILL").await;

    testbed.stop_agent().await;
    testbed.flood.wait_for_rounds(20).await;
    testbed.start_agent();
    testbed.wait_for_answers("stopped, and started again").await;
    testbed.assert_only_allowed_traffic("SIGTERM").await;

    // The upgrade starts a copy of the program as soon as the old agent has exited.
    let files = tempfile::tempdir().expect("a directory");
    let newer = files.path().join("wg-agent");
    std::fs::copy(agent_program(), &newer).expect("copy the program");
    testbed.stop_agent().await;
    let mut words = testbed.clusters.command(testbed.target(), &[]);
    words[0] = newer.display().to_string();
    testbed.agent = testbed
        .clusters
        .host(testbed.target())
        .spawn("newer", words)
        .expect("start the copied program");
    testbed.wait_for_answers("upgraded").await;
    testbed.assert_only_allowed_traffic("an upgrade").await;
}

async fn unavailable_api_server_changes_nothing(testbed: &mut Testbed) {
    testbed.kill_api();
    testbed.wait_for_answers("without an API server").await;
    testbed.assert_only_allowed_traffic("without an API server").await;
    testbed.kill_agent().await;
    testbed.start_agent();
    testbed.wait_for_answers("an agent that started from its cache").await;
    testbed
        .assert_only_allowed_traffic("an agent that started from its cache")
        .await;
    testbed.start_api().await;
    testbed.wait_for_answers("the API server is back").await;
    testbed.assert_only_allowed_traffic("an API server outage").await;
}

/// Packets that pass while the agent's nftables table is deleted are ignored: only this table protects the node from a member.
async fn deleted_tables_are_restored(testbed: &mut Testbed) {
    for how in ["flush ruleset", "delete table inet clustermesh"] {
        match how {
            "flush ruleset" => testbed.flush_ruleset(),
            _ => testbed.node.nft(how),
        }
        wait_until("the table to be written again", TIMEOUT, async || {
            let listed = testbed.node.output("nft", &["list", "table", "inet", "clustermesh"]);
            if listed.status.success() {
                Ok(())
            } else {
                Err(testbed.agent.log())
            }
        })
        .await
        .expect("the agent restores the table");
        testbed.wait_for_answers("the table is back").await;
        testbed.discard_traffic();
        testbed.assert_only_allowed_traffic(how).await;
    }
}

/// Checks the witness itself: it reports each packet once, although a listing of a growing nft set may lack or repeat elements.
/// Otherwise a forbidden packet that [`deleted_tables_are_restored`] ignores could appear again and make the next check fail.
#[test]
fn witness_counts_each_packet_once_while_its_set_grows() {
    let ns = NetNs::new("loopback");
    let mut witness = Witness::new(
        "loopback",
        NetNs::open("loopback", ns.path().as_ref()),
        CountingPoint::Arrival,
        "lo",
    );
    let _sender = BackgroundThread::start(&ns, |stop| {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        for port in 1..u16::MAX {
            if stop.load(Ordering::Acquire) {
                return;
            }
            // The socket may report an error about an earlier datagram.
            let _ = socket.send_to(b"?", ("127.0.0.1", port));
            if port % 4 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let mut seen = 0;
    while seen < 5000 {
        let counts = witness.new_counts();
        let twice: Vec<_> = counts
            .iter()
            .filter(|(key, count)| key.contains(" udp ") && **count > 1)
            .collect();
        assert!(twice.is_empty(), "sent once: {twice:?}");
        seen += counts.len();
    }
}

//! Tests two workers of one member in the hub's pod network: they and their pods reach each other by that network, not through a tunnel.

use clustermesh_lab::{Captured, TrafficClient};

use super::{HTTP_PORT, SIBLING, TestEnv, WORKER, expected_answer, pod, url};

/// The workers see each other's eth0 address, and their pods see each other's own address.
pub(super) async fn workers_and_their_pods_reach_each_other(env: &TestEnv<'_>) {
    let workers = [&env.worker, &env.sibling];
    for (from, to) in [(workers[0], workers[1]), (workers[1], workers[0])] {
        let client = TrafficClient::Host(from.name().to_owned());
        let answer = env.wait_for_answer(&client, &url(to.address(), HTTP_PORT)).await;
        assert_eq!(answer, expected_answer(to.name(), to.name(), from.address()));
    }
    let [one, other] = [WORKER, SIBLING].map(|worker| env.webs.iter().find(|web| web.node == worker).unwrap());
    for (from, to) in [(one, other), (other, one)] {
        let answer = env.wait_for_answer(&pod(from), &url(to.ip, 8080)).await;
        assert_eq!(answer, expected_answer(&to.name, &to.node, from.ip));
    }
}

/// The worker's capture contains packets between the workers and between their pods, but no WireGuard packet.
pub(super) async fn uses_no_tunnel(env: &TestEnv<'_>, captured: &Captured) {
    let sibling = env.sibling.address();
    let count = async |filter: &str| {
        captured
            .packets(&format!("host {sibling} and {filter}"))
            .await
            .unwrap()
            .len()
    };
    let (hosts, pods) = (
        count(&format!("tcp port {HTTP_PORT}")).await,
        count("udp port 8472").await,
    );
    assert!(
        hosts > 0 && pods > 0,
        "{hosts} packets between the workers, {pods} of the CNI's VXLAN"
    );
    assert_eq!(count("udp port 51820").await, 0);
}

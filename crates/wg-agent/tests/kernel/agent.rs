//! Changes the interface of a real agent that uses userspace WireGuard on the host's kernel. The agent must restore it and count the
//! repair. The tests in `tests/machine` do the same with the kernel's WireGuard, in a virtual machine. Needs root.

use clustermesh_tests::{
    netns::wait_until,
    pair::{TIMEOUT, exchange_peers, start_nodes},
    sessions::check_session_kept,
};

#[test]
fn interface_changes_are_repaired_and_counted_by_kind() {
    let sites = start_nodes();
    let [a, b] = &sites;
    let _agents = sites.each_ref().map(|site| site.agent("userspace"));
    exchange_peers(&sites);
    a.wait_until_reaches(b);
    a.wait_until_ready();
    let link = || {
        let link = &a.ns.ip_json(&format!("link show {}", a.interface))[0];
        (link["mtu"].clone(), link["flags"].clone())
    };
    let before = link();
    assert_eq!(a.repairs(), [].into());
    let handshakes = a.wg_show("latest-handshakes");
    a.ns.ip(&format!("link set {} mtu 1300", a.interface));
    wait_until("the MTU to be restored", TIMEOUT, || link() == before);
    wait_until("the repair to be counted", TIMEOUT, || {
        a.repairs() == [("mtu".to_owned(), 1)].into()
    });
    check_session_kept(&handshakes, &a.wg_show("latest-handshakes"));

    // A link that goes down loses its IPv4 routes and IPv6 addresses, but no session.
    a.ns.ip(&format!("link set {} down", a.interface));
    wait_until("the link to be up", TIMEOUT, || link() == before);
    a.wait_until_reaches(b);
    b.wait_until_reaches(a);
    wait_until("the second repair to be counted", TIMEOUT, || {
        a.repairs().get("link_down") == Some(&1)
    });
    check_session_kept(&handshakes, &a.wg_show("latest-handshakes"));
}

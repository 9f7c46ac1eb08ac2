//! Tests flows between a worker (a node of a member inside the hub's pod network), its pods and the hub.

use std::net::IpAddr;

use clustermesh_tests::path::{Capture, Family, MeshWithWorker, apply, request, serve, source_of};

pub(crate) fn worker_in_the_hub_replies_on_the_path_of_the_request(f: &'static Family) {
    let w = MeshWithWorker::new(f);
    serve(&w.worker, f.worker, 9090);
    serve(&w.worker_pod, f.worker_pod, 8080);
    serve(&w.mesh.hub_pod, f.hub_pod, 8080);
    w.echo(9091);
    // The worker's firewall (chains `leave` and `into_tunnel`) drops a reply that does not take the path of its request. So each
    // successful request proves that its reply took the same path: eth0 or the tunnel.
    let assert_replies_by_eth0 = |why: &str| {
        assert_eq!(source_of(&w.mesh.hub_pod, f.worker, 9090), f.hub_pod, "{why}");
        assert_eq!(w.ask_echo(&w.mesh.hub_pod, 9091, why), "hello");
        assert!(w.mesh.hub_pod.pings_patiently(f.worker), "{why}");
    };
    assert_replies_by_eth0("the tunnel is up");
    assert_eq!(source_of(&w.worker_pod, f.hub_pod, 8080), f.worker_pod);
    assert_eq!(source_of(&w.mesh.hub_pod, f.worker_pod, 8080), f.hub_pod);
    assert_eq!(source_of(&w.worker, f.hub_pod, 8080), f.worker_wireguard);

    // The address of the requesting hub pod is a thrown prefix. Requests that arrive through the tunnel must still be
    // answered through the tunnel.
    let mut thrown = w.inputs.clone();
    thrown.throw.insert(f.hub_pod.parse::<IpAddr>().unwrap().into());
    apply(&w.worker, &thrown);
    assert_eq!(source_of(&w.mesh.hub_pod, f.worker_pod, 8080), f.hub_pod);
    assert_replies_by_eth0("the client is a thrown prefix");

    let mut alone = w.inputs.clone();
    alone.peers.clear();
    apply(&w.worker, &alone);
    assert_replies_by_eth0("there is no Peer");
    for (interface, filter) in [("all", "1"), ("eth0", "1"), ("default", "1")] {
        w.worker
            .set_sysctl(&format!("net/ipv4/conf/{interface}/rp_filter"), filter);
    }
    assert_replies_by_eth0("the reverse path filter is strict");
    apply(&w.worker, &w.inputs);
    assert_replies_by_eth0("the tunnel is restored");
    assert_eq!(source_of(&w.worker_pod, f.hub_pod, 8080), f.worker_pod);
    w.worker.ip("link del kilo0");
    // Only TCP is tested here. Without the device, a UDP reply from a socket that is not bound to an address fails: its first route
    // lookup is before netfilter can mark it, and finds `unreachable`. With the device, the fallback route (`METRIC_FALLBACK`)
    // precedes `unreachable`.
    assert_eq!(
        source_of(&w.mesh.hub_pod, f.worker, 9090),
        f.hub_pod,
        "the device is deleted"
    );
    assert!(request(&w.worker_pod, f.hub_pod, 8080).is_err());
}

pub(crate) fn worker_in_the_hub_reaches_its_api_server_by_eth0(f: &'static Family) {
    let w = MeshWithWorker::new(f);
    serve(&w.mesh.hub_pod, f.hub_pod, 8080);
    w.mesh.service(&w.mesh.hub, f.service, f.hub_pod); // the API server's ClusterIP in the hub
    let reaches = |why: &str| {
        assert_eq!(source_of(&w.worker, f.service, 80), f.worker, "{why}");
        assert_eq!(
            source_of(&w.worker_pod, f.service, 80),
            f.worker,
            "{why}: a pod, masqueraded by the CNI"
        );
    };
    reaches("the tunnel is up");
    let mut alone = w.inputs.clone();
    alone.peers.clear();
    apply(&w.worker, &alone);
    reaches("there is no Peer");
    w.worker.ip("link del kilo0");
    reaches("the device is deleted");
}

pub(crate) fn worker_forwards_node_port_connections_into_the_tunnel(f: &'static Family) {
    let w = MeshWithWorker::new(f);
    serve(&w.mesh.hub2_pod, f.hub2_pod, 8080);
    // A NodePort of the worker with a hub pod as endpoint, requested by another hub pod through eth0.
    w.node_port(30080, f.hub2_pod);
    let capture = Capture::start(&w.worker, "eth0", &format!("dst host {}", f.hub2_pod));
    // The Peer of the first hub node contains the second node's pods, so the packets pass the first node, which masquerades them.
    assert_eq!(source_of(&w.mesh.hub_pod, f.worker, 30080), f.hub);
    // `finish` sends an end packet from the worker to the hub's bridge, and waits until the capture contains it.
    let on_eth0 = capture.finish(&w.worker, f.worker, f.hub_bridge);
    assert_eq!(on_eth0, Vec::<String>::new());
}

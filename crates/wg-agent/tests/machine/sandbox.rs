//! A sandbox on the kernel's WireGuard, whose tunnel lives on without an agent. Real agents; the one that serves the sandbox dies,
//! somebody takes its table away then, and a grant is taken back, while the sandbox's node sends without a pause. What a sandbox may
//! send, kind by kind and over IPv6, too, is `agent_sandbox`'s, where the tunnel is the agent's own.

use super::machine::in_the_machine;
use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clustermesh_api::{
    mesh::IsolationProfile,
    names::{KILO_WIREGUARD_IP, PEER_REQUIRES_POLICY},
    policy::{Allow, LocalService, PeerPolicy, PeerPolicySpec},
};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    attacker::Work,
    netns::{NetNs, wait_until},
    pair::{
        SOON, Site,
        api::{GRANTED, PEERS, POLICIES},
        two,
    },
};

/// What is granted of the endpoint, and what is not.
const PORT: u16 = 5000;
const OTHER: u16 = 5001;
/// Between two rounds of the sandbox's.
const PACE: Duration = Duration::from_millis(10);

/// Somebody who counts what comes, and answers.
struct Ear {
    heard: Arc<AtomicU64>,
    _work: Work,
}

impl Ear {
    fn new(ns: &NetNs, port: u16) -> Self {
        let socket = ns.enter(|| UdpSocket::bind(("0.0.0.0", port))).expect("bind");
        socket.set_read_timeout(Some(PACE)).expect("a timeout");
        let heard = Arc::<AtomicU64>::default();
        let counted = heard.clone();
        let work = Work::start(ns, move |stop| {
            while !stop.load(Ordering::Acquire) {
                if let Ok((_, from)) = socket.recv_from(&mut [0; 100]) {
                    counted.fetch_add(1, Ordering::AcqRel);
                    let _ = socket.send_to(b"!", from);
                }
            }
        });
        Self { heard, _work: work }
    }

    fn heard(&self) -> u64 {
        self.heard.load(Ordering::Acquire)
    }
}

/// Root on the sandbox's node.
struct Sandbox {
    rounds: Arc<AtomicU64>,
    answers: Arc<AtomicU64>,
    _work: Work,
}

impl Sandbox {
    /// Sends to all of these without a pause. Only the first is granted.
    fn start(ns: &NetNs, to: Vec<SocketAddr>) -> Self {
        let socket = ns.enter(|| UdpSocket::bind("0.0.0.0:0")).expect("bind");
        socket.set_nonblocking(true).expect("no waiting");
        let (rounds, answers) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (round, answered) = (rounds.clone(), answers.clone());
        let work = Work::start(ns, move |stop| {
            while !stop.load(Ordering::Acquire) {
                for to in &to {
                    // What is not sent is none of this test's business.
                    let _ = socket.send_to(b"?", to);
                }
                while let Ok((_, from)) = socket.recv_from(&mut [0; 100]) {
                    assert_eq!(from, to[0], "an answer that nobody may give");
                    answered.fetch_add(1, Ordering::AcqRel);
                }
                round.fetch_add(1, Ordering::AcqRel);
                thread::park_timeout(PACE);
            }
        });
        Self {
            rounds,
            answers,
            _work: work,
        }
    }

    /// Waits until it has sent so many times more.
    fn more(&self, rounds: u64) {
        let from = self.rounds.load(Ordering::Acquire);
        wait_until("the sandbox to send", SOON, || {
            self.rounds.load(Ordering::Acquire) >= from + rounds
        });
    }

    /// Waits until it is answered, from now on.
    fn is_served(&self, why: &str) {
        let from = self.answers.load(Ordering::Acquire);
        wait_until(&format!("answers: {why}"), SOON, || {
            self.answers.load(Ordering::Acquire) > from + 3
        });
    }
}

/// What a controller writes where a sandbox is served.
fn grants(a: &Site, sandbox: &Site) {
    let networks = vec![sandbox.wireguard()];
    let service = LocalService {
        namespace: "team".into(),
        name: "db".into(),
    };
    let spec = PeerPolicySpec {
        source: sandbox.node(),
        isolation_profile: IsolationProfile::Sandbox,
        sources: networks.clone(),
        networks,
        allow: vec![Allow {
            to: vec!["10.10.0.0/16".into()],
            service: Some(service),
            ..Allow::default()
        }],
        ..PeerPolicySpec::default()
    };
    let required = format!("{}@{}", sandbox.node(), spec.revision());
    let policy = serde_json::to_value(PeerPolicy::new(&sandbox.node(), spec)).expect("JSON");
    a.api.put(POLICIES, policy);
    let mut peer = sandbox.as_peer();
    let said = sandbox.published();
    let address = said[KILO_WIREGUARD_IP].split('/').next().expect("an address");
    peer["metadata"]["annotations"] = json!({PEER_REQUIRES_POLICY: required});
    peer["spec"]["allowedIPs"] = json!([format!("{address}/32")]);
    let spec = peer["spec"].as_object_mut().expect("a spec");
    spec.remove("endpoint").expect("it had one");
    a.api.put(PEERS, peer);
}

/// The granted Service has its endpoint in the pod here.
fn endpoint(a: &Site) {
    a.api.put(
        GRANTED,
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "db", "namespace": "team", "labels": {"kubernetes.io/service-name": "db"}},
            "addressType": "IPv4",
            "ports": [{"name": "log", "port": PORT, "protocol": "UDP"}],
            "endpoints": [{"addresses": [a.pod_ips()[0]], "nodeName": a.node(), "conditions": {"ready": true}}],
        }),
    );
}

#[test]
fn a_sandboxs_tunnel_in_the_kernel_outlives_its_agent_and_never_carries_more_than_is_granted() {
    in_the_machine!();
    let sites = two();
    let [a, b] = &sites;
    let (granted, beside, node) = (Ear::new(&a.pod, PORT), Ear::new(&a.pod, OTHER), Ear::new(&a.ns, PORT));
    let agent = a.agent("kernel");
    let _other = b.agent("kernel");
    endpoint(a);
    grants(a, b);
    b.learns_of(a);
    let link = a.ns.ip_json(&format!("-d link show {}", a.interface));
    assert_eq!(link[0]["linkinfo"]["info_kind"], "wireguard");
    let said = a.published();
    let wireguard = said[KILO_WIREGUARD_IP].split('/').next().expect("an address");
    let pod = &a.pod_ips()[0];
    let to = [(&**pod, PORT), (pod, OTHER), ("10.10.1.1", PORT), (wireguard, PORT)];
    let at = |(ip, port): (&str, u16)| SocketAddr::new(ip.parse().expect("an address"), port);
    b.is_routed_to(a);
    let sandbox = Sandbox::start(&b.ns, to.map(at).into());
    let begun = Instant::now();
    let says = |what: &str| println!("{:6.1} s {what}", begun.elapsed().as_secs_f64());
    sandbox.is_served("the first start");
    a.ready();
    says("served");

    // Dead, and the tunnel is not.
    agent.end(Signal::SIGKILL);
    sandbox.is_served("beside a dead agent");
    sandbox.more(30);
    says("served beside a dead agent");

    // The table goes while nobody is there to write it again: what is granted goes with it.
    a.ns.nft("flush ruleset");
    // What was on its way at that moment has arrived.
    sandbox.more(3);
    let before = granted.heard();
    sandbox.more(50);
    assert_eq!(granted.heard(), before, "routing is shut without the table");
    let peers = a.shown("latest-handshakes");
    assert!(peers.values().any(|at| at != "0"), "the tunnel was there: {peers:?}");
    says("closed without a table");
    let agent = a.agent("kernel");
    sandbox.is_served("the table is back");
    says("served by the next agent");

    a.api.delete(GRANTED, "db");
    wait_until("nothing more to arrive", SOON, || {
        let before = granted.heard();
        sandbox.more(20);
        granted.heard() == before
    });
    says("closed by a grant that was taken back");

    // Nobody else heard anything from the first packet on, and would have.
    let deaf = [beside.heard(), node.heard()];
    assert_eq!(deaf, [0, 0], "{}", agent.log());
    let near = a.ns.enter(|| UdpSocket::bind("0.0.0.0:0")).expect("bind");
    near.send_to(b"?", at((pod, OTHER))).expect("send");
    near.send_to(b"?", at((wireguard, PORT))).expect("send");
    wait_until("both to hear", SOON, || [beside.heard(), node.heard()] == [1, 1]);
}

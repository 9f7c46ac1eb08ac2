//! Sets up the testbed of the hostile member's tests: a target node with a real agent and pods, the node of a
//! cluster-meshed member, on which the attacker is root, and witnesses that count packets at nodes, pods and neighbours.

mod attack;
mod neighbours;
mod node_setup;
mod objects;
mod traffic;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use clustermesh_api::{
    names::{KILO_KEY, KILO_WIREGUARD_IP},
    policy::PeerPolicy,
};
use clustermesh_lab::{Running, wait_until};
use clustermesh_tests::{
    attacker::{
        Flood, PATIENCE, Prober, Tunnel, echo,
        witness::{CountingPoint, Counts, Witness},
    },
    netns::{NetNs, unique_name},
};
use kube::api::PostParams;
use x25519_dalek::StaticSecret;

use self::{
    node_setup::{set_up_node, tables},
    objects::{make_dual_stack, peer, policy},
    traffic::ObservedTraffic,
};
use crate::two_clusters::{MGMT, Site, TIMEOUT, TwoClusters};

/// A pod of the target. The flood sends only forbidden packets to it.
pub(crate) const DB: [&str; 2] = ["10.10.1.9", "fd00:10:0:1::9"];
/// The pod of the target to which the flood sends its allowed packets.
pub(crate) const ALLOWED_POD: [&str; 2] = ["10.10.1.10", "fd00:10:0:1::a"];
/// The addresses of the target node on its pod links.
pub(crate) const NODE_ON_POD_LINKS: [&str; 2] = ["10.10.1.1", "fd00:10:0:1::1"];
/// The IPv6 address of the target node on the underlay.
pub(crate) const NODE6: &str = "fd00:30::1:11";
/// A Service of the target whose endpoint is [`DB`].
pub(crate) const VIP: [&str; 2] = ["10.96.0.10", "fd00:96::10"];
/// The WireGuard addresses of the member's node.
pub(crate) const MEMBER: [&str; 2] = ["100.66.3.3", "fd00:66:3::3"];
/// The underlay address of the member's node.
pub(crate) const MEMBER_UNDERLAY: &str = "172.30.3.11";
/// The WireGuard addresses of a third member's node, which is also a peer of the target.
pub(crate) const THIRD: [&str; 2] = ["100.66.4.4", "fd00:66:4::4"];
/// Addresses of the third member's networks that no peer has: the target's route to them is `unreachable`.
pub(crate) const UNUSED: [&str; 2] = ["100.66.4.9", "fd00:66:4::9"];
/// The ports on which every pod, every machine of [`neighbours`] and the target node (at [`NODE_ON_POD_LINKS`]) listen.
pub(crate) const UDP_PORT: u16 = 5000;
pub(crate) const TCP_PORT: u16 = 8080;
/// Source port of the prober, which sends legitimate requests from the member to [`ALLOWED_POD`].
pub(crate) const PROBER_PORT: u16 = 9010;
/// Source ports of the flood to the allowed pod: datagrams and connections.
pub(crate) const FLOOD_PORTS: [u16; 2] = [9021, 9022];

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) struct Testbed {
    pub(crate) clusters: TwoClusters,
    pub(crate) node: NetNs,
    pub(crate) agent: Running,
    pub(crate) flood: Flood,
    prober: Prober,
    /// The witnesses in the pods and in the machines around the node.
    arrival_witnesses: Vec<Witness>,
    /// The witness on the node, which counts packets after the node's filters.
    node_witness: Witness,
    member_witness: Witness,
    /// Number of calls of [`Self::start_agent`].
    starts: u32,
    _pods: [NetNs; 2],
    _surroundings: neighbours::Surroundings,
    _member: Arc<Tunnel>,
}

impl Testbed {
    /// Kills the API server of the target cluster.
    pub(crate) fn kill_api(&self) {
        let cluster = self.clusters.lab.cluster(self.target().cluster);
        cluster.kill_api().expect("kill the API server");
    }

    /// Starts the API server of the target cluster again.
    pub(crate) async fn start_api(&self) {
        let cluster = self.clusters.lab.cluster(self.target().cluster);
        cluster.start_api().await.expect("start the API server");
    }

    pub(crate) async fn start() -> Self {
        let clusters = TwoClusters::start().await;
        let target = clusters.site(MGMT);
        let node = NetNs::open("the target's node", &clusters.host(target).netns());
        let host = clusters
            .lab
            .add_host("tenant-b-1", MEMBER_UNDERLAY.parse().expect("an address"))
            .await;
        let member_ns = NetNs::open("the member's node", &host.expect("add a host").netns());
        let pods = ["a pod", "another pod"].map(NetNs::new);
        set_up_node(&node, &pods);
        let surroundings = neighbours::Surroundings::new(&node);
        for address in NODE_ON_POD_LINKS {
            echo(&node, ip(address), UDP_PORT, TCP_PORT);
        }
        node.nft(&tables(&target.interface));
        make_dual_stack(&clusters, target).await;

        // Without a route, the kernel sends no IPv6 packet, not even from a raw socket.
        let routes = ["10.10.0.0/16", "::/0"];
        let (interface, key) = (unique_name("km"), StaticSecret::from([78; 32]));
        let member = Arc::new(Tunnel::open(&member_ns, &interface, key, &MEMBER.map(ip), &routes));

        let agent = clusters.agent(target, "agent");
        let annotations = clusters.wait_for_published(target).await;
        let key = annotations[KILO_KEY].parse().expect("a key");
        member.set_peer(key, SocketAddr::new(ip(target.address), 51820));
        let wireguard = annotations[KILO_WIREGUARD_IP].split('/').next().expect("a host part");
        let wireguard = ip(wireguard);
        let flood = Flood::start(
            &member_ns,
            &member.interface,
            attack::flood_packets(wireguard),
            (&node, 51820),
        );
        let from = SocketAddr::new(ip(MEMBER[0]), PROBER_PORT);
        let prober = Prober::udp(&member_ns, &member, from, SocketAddr::new(ip(ALLOWED_POD[0]), UDP_PORT));
        let [first, second] = &pods;
        let witness = |name, ns: &NetNs, interface: &str| {
            Witness::new(
                name,
                NetNs::open(name, ns.path().as_ref()),
                CountingPoint::Arrival,
                interface,
            )
        };
        let testbed = Self {
            arrival_witnesses: vec![
                witness("a pod", first, "eth0"),
                witness("another pod", second, "eth0"),
                witness("the node's neighbour", &surroundings.neighbour, "eth0"),
                witness("a container of the node", &surroundings.container, "eth0"),
            ],
            member_witness: witness("the member", &member_ns, &member.interface),
            node_witness: Witness::new(
                "the target's node",
                NetNs::open("the target's node", node.path().as_ref()),
                CountingPoint::AfterFilters,
                &target.interface,
            ),
            node,
            agent,
            flood,
            prober,
            starts: 0,
            _pods: pods,
            _surroundings: surroundings,
            _member: member,
            clusters,
        };
        testbed.write_objects().await;
        testbed
    }

    async fn write_objects(&self) {
        let target = self.target();
        let create = PostParams::default();
        let policies = self.clusters.policies(target).await;
        for (source, wireguard) in [("tenant-b", MEMBER), ("tenant-c", THIRD)] {
            let policy = PeerPolicy::new(&format!("mesh--{source}"), policy(source, wireguard));
            policies.create(&create, &policy).await.expect("create a PeerPolicy");
        }
        let peers = self.clusters.peers(target).await;
        let member = StaticSecret::from([78; 32]);
        for peer in [
            peer("mesh--tenant-b--tenant-b-1", &member, MEMBER, Some(MEMBER_UNDERLAY)),
            peer("mesh--tenant-c--tenant-c-1", &StaticSecret::from([76; 32]), THIRD, None),
        ] {
            peers.create(&create, &peer).await.expect("create a Peer");
        }
    }

    pub(crate) fn target(&self) -> &Site {
        self.clusters.site(MGMT)
    }

    /// Packets that the attacker's own kernel refused to send.
    pub(crate) fn unsent(&self) -> BTreeMap<String, u64> {
        self.flood.unsent()
    }

    /// Starts a new agent after the last one has ended.
    pub(crate) fn start_agent(&mut self) {
        self.starts += 1;
        self.agent = self
            .clusters
            .agent_with_env_and_args(self.target(), &format!("agent-{}", self.starts), &[], &[]);
    }

    pub(crate) async fn kill_agent(&mut self) {
        self.agent.signal(nix::sys::signal::Signal::SIGKILL).expect("kill");
        self.agent.wait_for_exit(TIMEOUT).await.expect("dead");
    }

    pub(crate) async fn stop_agent(&mut self) {
        self.agent.terminate(TIMEOUT).await.expect("it ends");
    }

    /// Flushes the whole ruleset. The tables that are not the agent's are restored in the same transaction.
    pub(crate) fn flush_ruleset(&self) {
        self.node
            .nft(&format!("flush ruleset\n{}", tables(&self.target().interface)));
    }

    /// Waits until the prober has two new replies: the first one may be to a request from before the call.
    pub(crate) async fn wait_for_answers(&self, why: &str) {
        let before = self.prober.replies();
        wait_until(format!("answers: {why}"), PATIENCE, async || {
            if self.prober.replies() >= before + 2 {
                Ok(())
            } else {
                Err(format!("fewer than two at {}\n{}", self.prober.name, self.agent.log()))
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// The traffic since the last call of this function: what arrived in the pods and at the machines around the node,
    /// what the node accepted or forwarded, and replies at the member.
    fn new_traffic(&mut self) -> ObservedTraffic {
        let sources = |counts: &Counts| {
            let source = |key: &String| key.split(" -> ").next().unwrap_or_default().to_owned();
            counts.keys().map(source).collect()
        };
        let mut arrived = Counts::new();
        for witness in &mut self.arrival_witnesses {
            arrived.extend(witness.new_counts());
        }
        // If the node cannot route a reply of a pod or neighbour, it sends an ICMP error to the pod or neighbour. These errors are not the
        // attacker's traffic. Neighbours have replies to send because packets reached them while the agent's nftables table was deleted.
        arrived.retain(|key, _| {
            ![NODE_ON_POD_LINKS, neighbours::NODE_ON_LAN, neighbours::BRIDGE]
                .iter()
                .flatten()
                .any(|own| key.starts_with(&format!("{own} destination-unreachable")))
        });
        ObservedTraffic {
            passed: self.node_witness.new_counts(),
            replies: sources(&self.member_witness.new_counts()),
            arrived,
        }
    }

    /// Ignores the traffic so far.
    pub(crate) fn discard_traffic(&mut self) {
        self.new_traffic();
    }

    /// Waits until every kind of allowed traffic has been seen, except ICMP errors. Fails if one is still missing after 5000 rounds of the
    /// flood, or if forbidden traffic has been seen.
    /// Considers only traffic since the end of the previous call of this function or of [`Self::discard_traffic`].
    pub(crate) async fn assert_only_allowed_traffic(&mut self, what: &str) {
        let allowed = ObservedTraffic::allowed();
        // The kernel rate-limits ICMP errors, so they are allowed but not required: destination-unreachable from the member, and
        // parameter-problem as a reply of the pod.
        let mut required = allowed.clone();
        let is_required = |key: &String| !key.contains("destination-unreachable");
        required.arrived.retain(|key, _| is_required(key));
        required.passed.retain(|key, _| is_required(key));
        required.replies.retain(|key| !key.contains("parameter-problem"));
        let mut traffic = self.new_traffic();
        for _ in 0..200 {
            if required.not_in(&traffic).is_empty() {
                break;
            }
            self.flood.wait_for_rounds(25).await;
            traffic.add(self.new_traffic());
        }
        traffic.print(what, &allowed, &self.flood);
        let (forbidden, missing, nothing) = (traffic.not_in(&allowed), required.not_in(&traffic), BTreeSet::new());
        for (key, count) in traffic.arrived.iter().chain(&traffic.passed) {
            if forbidden.contains(key) {
                println!("not allowed: {count} of {key}");
            }
        }
        assert_eq!(
            (forbidden, missing),
            (nothing.clone(), nothing),
            "{what}\n{}",
            self.agent.log()
        );
    }
}

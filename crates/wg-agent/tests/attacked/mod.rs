//! The stage of agent_hostile_member: a target's node with a real agent, pods behind it, a cluster-meshed member's node whose root
//! is an attacker, and witnesses of all that passes. What happens to the target is the test's business.

mod around;
mod furniture;
mod objects;
mod seen;
mod shots;

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
use kube::api::PostParams;
use x25519_dalek::StaticSecret;

use self::{
    furniture::{furnish, tables},
    objects::{peer, policy, two_families},
    seen::Seen,
};
use crate::{
    attacker::{
        Asker, Flood, PATIENCE, Tunnel, echo,
        witness::{At, Counts, Witness},
    },
    netns::{NetNs, unique_name},
    node::{MGMT, SOON, Site, World},
};

/// Two pods, of which the member talks to the second; a pair is of both families.
pub(crate) const DB: [&str; 2] = ["10.10.1.9", "fd00:10:0:1::9"];
pub(crate) const OTHER: [&str; 2] = ["10.10.1.10", "fd00:10:0:1::a"];
/// Where the target's pods find their node.
pub(crate) const GATEWAY: [&str; 2] = ["10.10.1.1", "fd00:10:0:1::1"];
/// The target's node on the underlay, over IPv6.
pub(crate) const NODE6: &str = "fd00:30::1:11";
/// A Service of the target's, whose endpoint is the first pod.
pub(crate) const VIP: [&str; 2] = ["10.96.0.10", "fd00:96::10"];
/// The member's node: inside, and on the underlay.
pub(crate) const MEMBER: [&str; 2] = ["100.66.3.3", "fd00:66:3::3"];
pub(crate) const MEMBER_AT: &str = "172.30.3.11";
/// A third member's node, whose tunnel the target has, too.
pub(crate) const THIRD: [&str; 2] = ["100.66.4.4", "fd00:66:4::4"];
/// What every pod, and whoever stands around, listens on.
pub(crate) const UDP_PORT: u16 = 5000;
pub(crate) const TCP_PORT: u16 = 8080;
/// Source port of who asks in earnest.
pub(crate) const MEMBER_ASKING: u16 = 9010;
/// Of the flood against what is open: datagrams and connections.
pub(crate) const MEMBERS_FLOOD: [u16; 2] = [9021, 9022];

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The whole.
pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) node: NetNs,
    pub(crate) agent: Running,
    pub(crate) flood: Flood,
    asker: Asker,
    pods: Vec<Witness>,
    passed: Witness,
    members: Witness,
    starts: u32,
    _pods: [NetNs; 2],
    _around: around::Around,
    _member: Arc<Tunnel>,
}

impl Stage {
    /// The API server of the node under attack is killed.
    pub(crate) fn api_goes(&self) {
        let cluster = self.world.lab.cluster(self.mgmt().cluster);
        cluster.kill_api().expect("kill the API server");
    }

    /// It answers again.
    pub(crate) async fn api_comes(&self) {
        let cluster = self.world.lab.cluster(self.mgmt().cluster);
        cluster.start_api().await.expect("start the API server");
    }

    pub(crate) async fn start() -> Self {
        let world = World::start().await;
        let mgmt = world.site(MGMT);
        let node = NetNs::at("the target's node", &world.host(mgmt).netns());
        let host = world
            .lab
            .add_host("tenant-b-1", MEMBER_AT.parse().expect("an address"))
            .await;
        let members = NetNs::at("the member's node", &host.expect("add a host").netns());
        let pods = ["a pod", "another pod"].map(NetNs::new);
        furnish(&node, &pods);
        let around = around::Around::new(&node);
        for address in GATEWAY {
            echo(&node, ip(address), UDP_PORT, TCP_PORT);
        }
        node.nft(&tables(&mgmt.interface));
        two_families(&world, mgmt).await;

        // The kernel sends nothing over IPv6, by whatever socket, without a route.
        let routes = ["10.10.0.0/16", "::/0"];
        let (interface, key) = (unique_name("km"), StaticSecret::from([78; 32]));
        let member = Arc::new(Tunnel::open(&members, &interface, key, &MEMBER.map(ip), &routes));

        let agent = world.agent(mgmt, "agent");
        let said = world.published(mgmt).await;
        let key = said[KILO_KEY].parse().expect("a key");
        member.dial(key, SocketAddr::new(ip(mgmt.address), 51820));
        let wireguard = said[KILO_WIREGUARD_IP].split('/').next().expect("a host part");
        let wireguard = ip(wireguard);
        let flood = Flood::start(&members, &member.interface, shots::all(wireguard), (&node, 51820));
        let from = SocketAddr::new(ip(MEMBER[0]), MEMBER_ASKING);
        let asker = Asker::udp(&members, &member, from, SocketAddr::new(ip(OTHER[0]), UDP_PORT));
        let [first, second] = &pods;
        let watched = |name, ns: &NetNs, interface: &str| {
            Witness::new(name, NetNs::at(name, ns.path().as_ref()), At::Arrival, interface)
        };
        let stage = Self {
            pods: vec![
                watched("a pod", first, "eth0"),
                watched("another pod", second, "eth0"),
                watched("the node's neighbour", &around.neighbour, "eth0"),
                watched("a container of the node's", &around.container, "eth0"),
            ],
            members: watched("the member", &members, &member.interface),
            passed: Witness::new(
                "the target's node",
                NetNs::at("the target's node", node.path().as_ref()),
                At::Passed,
                &mgmt.interface,
            ),
            node,
            agent,
            flood,
            asker,
            starts: 0,
            _pods: pods,
            _around: around,
            _member: member,
            world,
        };
        stage.introduce().await;
        stage
    }

    async fn introduce(&self) {
        let mgmt = self.mgmt();
        let create = PostParams::default();
        let policies = self.world.policies(mgmt).await;
        for (source, nodes) in [("tenant-b", MEMBER), ("tenant-c", THIRD)] {
            let policy = PeerPolicy::new(&format!("mesh--{source}"), policy(source, nodes));
            policies.create(&create, &policy).await.expect("create a PeerPolicy");
        }
        let peers = self.world.peers(mgmt).await;
        let member = StaticSecret::from([78; 32]);
        for peer in [
            peer("mesh--tenant-b--tenant-b-1", &member, MEMBER, Some(MEMBER_AT)),
            peer("mesh--tenant-c--tenant-c-1", &StaticSecret::from([76; 32]), THIRD, None),
        ] {
            peers.create(&create, &peer).await.expect("create a Peer");
        }
    }

    pub(crate) fn mgmt(&self) -> &Site {
        self.world.site(MGMT)
    }

    /// What the attacker's own kernel would not send.
    pub(crate) fn unsent(&self) -> BTreeMap<String, u64> {
        self.flood.unsent()
    }

    /// Starts an agent.
    pub(crate) fn started(&mut self) {
        self.starts += 1;
        self.agent = self
            .world
            .agent_as(self.mgmt(), &format!("agent-{}", self.starts), &[], &[]);
    }

    pub(crate) async fn killed(&mut self) {
        self.agent.signal(nix::sys::signal::Signal::SIGKILL).expect("kill");
        self.agent.ends(SOON).await.expect("dead");
    }

    pub(crate) async fn stopped(&mut self) {
        self.agent.terminate(SOON).await.expect("it ends");
    }

    /// Another hand takes every table away; those that are not the agent's are back in the same moment.
    pub(crate) fn flushed(&self) {
        self.node
            .nft(&format!("flush ruleset\n{}", tables(&self.mgmt().interface)));
    }

    /// Waits until who may ask is answered, from now on.
    pub(crate) async fn answered(&self, why: &str) {
        let before = self.asker.answers();
        wait_until(format!("answers: {why}"), PATIENCE, async || {
            if self.asker.answers() > before + 1 {
                Ok(())
            } else {
                Err(format!("none of {}\n{}", self.asker.name, self.agent.log()))
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Everything that was seen since the last look: in the pods, of what the node took or sent on, and where it came back.
    fn look(&mut self) -> Seen {
        let sources = |counts: &Counts| {
            let source = |key: &String| key.split(" -> ").next().unwrap_or_default().to_owned();
            counts.keys().map(source).collect()
        };
        let mut arrived = Counts::new();
        for pod in &mut self.pods {
            arrived.extend(pod.news());
        }
        // Its own node tells a pod, or a neighbour that the member reached without a table, that there is no way for its answers.
        arrived.retain(|key, _| {
            ![GATEWAY, around::NODE_THERE, around::BRIDGE]
                .iter()
                .flatten()
                .any(|own| key.starts_with(&format!("{own} destination-unreachable")))
        });
        Seen {
            passed: self.passed.news(),
            members: sources(&self.members.news()),
            arrived,
        }
    }

    /// Leaves out what was seen so far.
    pub(crate) fn forget(&mut self) {
        self.look();
    }

    /// Waits until everything that is open has been seen since the last call, and nothing else was.
    pub(crate) async fn exactly(&mut self, what: &str) {
        let open = Seen::open();
        // The kernel says so as often as it likes.
        let mut want = open.clone();
        let asked = |key: &String| !key.contains("destination-unreachable");
        want.arrived.retain(|key, _| asked(key));
        want.passed.retain(|key, _| asked(key));
        want.members.retain(|key| !key.contains("parameter-problem"));
        let mut seen = self.look();
        for _ in 0..200 {
            if want.beyond(&seen).is_empty() {
                break;
            }
            self.flood.more(25).await;
            seen.add(self.look());
        }
        seen.print(what, &open, &self.flood);
        let (beyond, missing, nothing) = (seen.beyond(&open), want.beyond(&seen), BTreeSet::new());
        for (key, count) in seen.arrived.iter().chain(&seen.passed) {
            if beyond.contains(key) {
                println!("not open: {count} of {key}");
            }
        }
        assert_eq!(
            (beyond, missing),
            (nothing.clone(), nothing),
            "{what}\n{}",
            self.agent.log()
        );
    }
}

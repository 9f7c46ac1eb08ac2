//! The stage of agent_sandbox: a target's node with a real agent, pods behind it, a sandbox's node that is the attacker, a
//! trusted member's node whose root is an attacker, too, and witnesses of all that passes. What happens to the target is the
//! test's business.

mod around;
mod furniture;
pub(crate) mod objects;
mod seen;
mod shots;
mod trusted;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use base64::Engine;
use clustermesh_api::{
    names::{KILO_KEY, KILO_WIREGUARD_IP},
    policy::PeerPolicy,
};
use clustermesh_lab::{Running, wait_until};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use x25519_dalek::StaticSecret;

use self::{
    furniture::{furnish, tables},
    objects::{POLICY, attackers_key, peer, policy, sandboxs_peer, slice, trusting, two_families},
    seen::Seen,
};
use crate::{
    attacker::{
        Asker, Flood, PATIENCE, Tunnel, echo,
        witness::{At, Counts, Witness},
    },
    netns::{NetNs, unique_name},
    node::{MGMT, SOON, Site, TENANT, World},
};

/// The granted Service's endpoint, a pod beside it, and one that the endpoint moves to; a pair is of both families.
pub(crate) const DB: [&str; 2] = ["10.10.1.9", "fd00:10:0:1::9"];
pub(crate) const OTHER: [&str; 2] = ["10.10.1.10", "fd00:10:0:1::a"];
pub(crate) const SPARE: [&str; 2] = ["10.10.1.11", "fd00:10:0:1::b"];
/// Where the target's pods find their node.
pub(crate) const GATEWAY: [&str; 2] = ["10.10.1.1", "fd00:10:0:1::1"];
/// The target's node on the underlay, over IPv6.
pub(crate) const NODE6: &str = "fd00:30::1:11";
/// A Service of the target's, whose endpoint is the granted one.
pub(crate) const VIP: [&str; 2] = ["10.96.0.10", "fd00:96::10"];
pub(crate) const ATTACKER: [&str; 2] = ["100.66.2.77", "fd00:66:2::77"];
/// The trusted member's node: inside, and on the underlay.
pub(crate) const MEMBER: [&str; 2] = ["100.66.3.3", "fd00:66:3::3"];
pub(crate) const MEMBER_AT: &str = "172.30.3.11";
/// A third member's node, whose tunnel the target has, too.
pub(crate) const THIRD: [&str; 2] = ["100.66.4.4", "fd00:66:4::4"];
/// What is granted of every endpoint.
pub(crate) const UDP_PORT: u16 = 5000;
pub(crate) const TCP_PORT: u16 = 8080;
/// Source ports: of the flood against the granted endpoint, of what asks there, and of the member.
pub(crate) const FLOOD: [u16; 3] = [9001, 9002, 9004];
pub(crate) const ASKING: u16 = 9003;
pub(crate) const MEMBER_ASKING: u16 = 9010;
/// Of the member's flood against what is open to it: datagrams and connections.
pub(crate) const MEMBERS_FLOOD: [u16; 2] = [9021, 9022];
/// Of the flood against the endpoint's next place.
pub(crate) const SPARE_FLOOD: [u16; 2] = [9011, 9012];

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The whole.
pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) node: NetNs,
    pub(crate) agent: Running,
    pub(crate) attacker: Arc<Tunnel>,
    pub(crate) attackers: NetNs,
    pub(crate) flood: Flood,
    /// Its rounds at the last look.
    looked_at: u64,
    /// Of the sandbox, then the member's.
    askers: Vec<Asker>,
    pods: Vec<Witness>,
    passed: Witness,
    came: Witness,
    members: Witness,
    starts: u32,
    members_flood: Flood,
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
        let (mgmt, tenant) = (world.site(MGMT), world.site(TENANT));
        let node = NetNs::at("the target's node", &world.host(mgmt).netns());
        let attackers = NetNs::at("the attacker's node", &world.host(tenant).netns());
        let host = world
            .lab
            .add_host("tenant-b-1", MEMBER_AT.parse().expect("an address"))
            .await;
        let members = NetNs::at("the member's node", &host.expect("add a host").netns());
        let pods = ["the granted pod", "another pod"].map(NetNs::new);
        furnish(&node, &pods);
        let around = around::Around::new(&node);
        for address in GATEWAY {
            echo(&node, ip(address), UDP_PORT, TCP_PORT);
        }
        node.nft(&tables(&mgmt.interface));
        two_families(&world, mgmt).await;

        // The kernel sends nothing over IPv6, by whatever socket, without a route.
        let routes = ["10.10.0.0/16", "::/0"];
        let open = |ns: &NetNs, interface: &str, key, addresses: [&str; 2]| {
            Arc::new(Tunnel::open(ns, interface, key, &addresses.map(ip), &routes))
        };
        let attacker = open(&attackers, &tenant.interface, attackers_key(), ATTACKER);
        let members_key = StaticSecret::from([78; 32]);
        let member = open(&members, &unique_name("km"), members_key.clone(), MEMBER);

        let agent = world.agent(mgmt, "agent");
        let said = world.published(mgmt).await;
        let key = said[KILO_KEY].parse().expect("a key");
        for tunnel in [&attacker, &member] {
            tunnel.dial(key, SocketAddr::new(ip(mgmt.address), 51820));
        }
        let wireguard = said[KILO_WIREGUARD_IP].split('/').next().expect("a host part");
        let wireguard = ip(wireguard);
        let into = (&node, 51820);
        let flood = Flood::start(&attackers, &attacker.interface, shots::all(wireguard), into);
        let members_flood = Flood::start(&members, &member.interface, trusted::all(wireguard), into);
        let pair = |from: [&str; 2], port, to: [&str; 2]| {
            [0, 1].map(|family| {
                (
                    SocketAddr::new(ip(from[family]), port),
                    SocketAddr::new(ip(to[family]), UDP_PORT),
                )
            })
        };
        let mut askers = Vec::new();
        for (from, to) in pair(ATTACKER, ASKING, DB) {
            askers.push(Asker::udp(&attackers, &attacker, from, to));
            askers.push(Asker::tcp(&attackers, SocketAddr::new(to.ip(), TCP_PORT)));
        }
        let [(from, to), _] = pair(MEMBER, MEMBER_ASKING, OTHER);
        askers.push(Asker::udp(&members, &member, from, to));
        let [first, second] = &pods;
        let watched = |name, ns: &NetNs, interface: &str| {
            Witness::new(name, NetNs::at(name, ns.path().as_ref()), At::Arrival, interface)
        };
        let stage = Self {
            looked_at: 0,
            pods: vec![
                watched("the granted pod", first, "eth0"),
                watched("another pod", second, "eth0"),
                watched("the node's neighbour", &around.neighbour, "eth0"),
                watched("a container of the node's", &around.container, "eth0"),
            ],
            came: watched("the attacker", &attackers, &attacker.interface),
            members: watched("the member", &members, &member.interface),
            passed: Witness::new(
                "the target's node",
                NetNs::at("the target's node", node.path().as_ref()),
                At::Passed,
                &mgmt.interface,
            ),
            node,
            agent,
            attacker,
            attackers,
            flood,
            askers,
            starts: 0,
            members_flood,
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
        for family in [0, 1] {
            let slices = self.slices().await;
            for (service, at) in [("db", DB), ("other", OTHER)] {
                let slice = slice(service, family, at[family], false);
                slices.create(&create, &slice).await.expect("create an EndpointSlice");
            }
            // A backend in the host network, whose addresses the cluster has not in the mesh.
            let mut hosted = slice("db", family, ["172.30.1.11", NODE6][family], false);
            hosted.metadata.name = hosted.metadata.name.map(|name| format!("{name}-hosted"));
            slices.create(&create, &hosted).await.expect("create an EndpointSlice");
        }
        let policies = self.world.policies(mgmt).await;
        for (name, spec) in [
            (POLICY, policy("db")),
            ("mesh--tenant-b", trusting("tenant-b", MEMBER)),
            ("mesh--tenant-c", trusting("tenant-c", THIRD)),
        ] {
            let policy = PeerPolicy::new(name, spec);
            policies.create(&create, &policy).await.expect("create a PeerPolicy");
        }
        let peers = self.world.peers(mgmt).await;
        let member = StaticSecret::from([78; 32]);
        for peer in [
            sandboxs_peer(&policy("db")),
            peer("mesh--tenant-b--tenant-b-1", &member, MEMBER, Some(MEMBER_AT)),
            peer("mesh--tenant-c--tenant-c-1", &StaticSecret::from([76; 32]), THIRD, None),
        ] {
            peers.create(&create, &peer).await.expect("create a Peer");
        }
    }

    pub(crate) fn mgmt(&self) -> &Site {
        self.world.site(MGMT)
    }

    pub(crate) async fn slices(&self) -> Api<EndpointSlice> {
        Api::namespaced(self.world.client(self.mgmt()).await, "default")
    }

    /// Where the granted Service's endpoint of this family is now.
    pub(crate) async fn endpoint(&self, family: usize, address: &str, terminating: bool) {
        let slice = slice("db", family, address, terminating);
        let name = slice.metadata.name.clone().expect("a name");
        let patch = serde_json::json!({"endpoints": slice.endpoints});
        let slices = self.slices().await;
        slices
            .patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .expect("patch an EndpointSlice");
    }

    /// What the attackers' own kernels would not send.
    pub(crate) fn unsent(&self) -> BTreeMap<String, u64> {
        let mut all = self.flood.unsent();
        all.extend(self.members_flood.unsent());
        all
    }

    /// Starts an agent, with more words behind its name.
    pub(crate) fn started(&mut self, more: &[&str]) {
        self.starts += 1;
        self.agent = self
            .world
            .agent_as(self.mgmt(), &format!("agent-{}", self.starts), &[], more);
    }

    pub(crate) async fn killed(&mut self) {
        self.agent.signal(nix::sys::signal::Signal::SIGKILL).expect("kill");
        self.agent.ends(SOON).await.expect("dead");
    }

    pub(crate) async fn stopped(&mut self) {
        self.agent.terminate(SOON).await.expect("it ends");
    }

    /// The node's private key.
    pub(crate) fn key(&self) -> StaticSecret {
        let text = fs::read_to_string(self.world.key_file(self.mgmt())).expect("the key");
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(text.trim())
            .expect("base64");
        StaticSecret::from(<[u8; 32]>::try_from(bytes).expect("32 bytes"))
    }

    /// Another hand takes every table away; those that are not the agent's are back in the same moment.
    pub(crate) fn flushed(&self) {
        self.node
            .nft(&format!("flush ruleset\n{}", tables(&self.mgmt().interface)));
    }

    /// Waits until everybody who may ask is answered, from now on.
    pub(crate) async fn answered(&self, why: &str) {
        self.all_answered(&self.askers, why).await;
    }

    /// The same of those who ask from the sandbox.
    pub(crate) async fn sandbox_answered(&self, why: &str) {
        self.all_answered(&self.askers[..4], why).await;
    }

    async fn all_answered(&self, askers: &[Asker], why: &str) {
        let before: Vec<u64> = askers.iter().map(Asker::answers).collect();
        wait_until(format!("answers: {why}"), PATIENCE, async || {
            let late = askers.iter().zip(&before);
            let late: Vec<_> = late
                .filter(|(asker, before)| asker.answers() <= **before + 1)
                .map(|(asker, _)| &asker.name)
                .collect();
            if late.is_empty() {
                Ok(())
            } else {
                Err(format!("none of {late:?}\n{}", self.agent.log()))
            }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// How often this agent has put a sandbox out of the device.
    pub(crate) fn left(&self) -> usize {
        self.agent.log().matches("a sandbox's peer leaves the device").count()
    }

    /// Everything that was seen since the last look: in the pods, of what the node took or sent on, and where it came back.
    fn look(&mut self) -> Seen {
        self.looked_at = self.flood.rounds();
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
        let mut members: BTreeSet<String> = sources(&self.members.news());
        // The node's routes say at once that there is no way from a member to a sandbox.
        members.retain(|key| !(key.starts_with("100.66.1.") && key.ends_with(" destination-unreachable")));
        Seen {
            passed: self.passed.news(),
            came: sources(&self.came.news()),
            members,
            arrived,
        }
    }

    /// Waits until everything that is granted has been seen since the last call, and nothing else was.
    pub(crate) async fn exactly(&mut self, what: &str) {
        self.sees(what, &Seen::granted(false), &Seen::granted(false)).await;
    }

    /// The same where the endpoint was at its next place before.
    pub(crate) async fn exactly_after_a_move(&mut self, what: &str) {
        self.sees(what, &Seen::granted(false), &Seen::granted(true)).await;
    }

    /// The same where the member's tunnel is down.
    pub(crate) async fn exactly_but_for_the_member(&mut self, what: &str) {
        let mut want = Seen::granted(false);
        let member = |key: &String| MEMBER.iter().any(|from| key.starts_with(from));
        want.arrived.retain(|key, _| !member(key));
        want.passed.retain(|key, _| !member(key));
        want.members.clear();
        self.sees(what, &want, &Seen::granted(false)).await;
    }

    async fn sees(&mut self, what: &str, want: &Seen, granted: &Seen) {
        // The kernel says so as often as it likes.
        let mut want = want.clone();
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
        seen.print(what, granted, &self.flood);
        let (beyond, missing, nothing) = (seen.beyond(granted), want.beyond(&seen), BTreeSet::new());
        for (key, count) in seen.arrived.iter().chain(&seen.passed) {
            if beyond.contains(key) {
                println!("beyond the grants: {count} of {key}");
            }
        }
        assert_eq!(
            (beyond, missing),
            (nothing.clone(), nothing),
            "{what}\n{}",
            self.agent.log()
        );
    }

    /// Waits until nothing of the sandbox passes any more, although it sends; what did before was granted.
    pub(crate) async fn closed(&mut self, what: &str) {
        // What the target's own device tells a pod that tries again to answer is none of its packets.
        let sandboxs = |key: &&String| {
            ATTACKER.iter().any(|from| key.starts_with(from)) && !key.contains("destination-unreachable")
        };
        let quiet = |more: &Seen| more.arrived.keys().chain(more.passed.keys()).find(sandboxs).is_none();
        self.until(&format!("{what}: closed"), &Seen::granted(false), quiet)
            .await;
    }

    /// Waits until the endpoint's next place alone is reached; what came before was granted.
    pub(crate) async fn only_moved(&mut self, what: &str) {
        let count = |more: &Seen, places: [&str; 2]| {
            let at = |key: &&String| places.iter().any(|to| key.contains(&format!("-> {to}:")));
            more.arrived.keys().filter(at).count()
        };
        let there = |more: &Seen| count(more, SPARE) == 4 && count(more, DB) == 0;
        self.until(what, &Seen::granted(true), there).await;
    }

    async fn until(&mut self, what: &str, granted: &Seen, holds: impl Fn(&Seen) -> bool) {
        let mut seen = self.look();
        for round in 0.. {
            self.flood.more(25).await;
            let more = self.look();
            let held = holds(&more);
            seen.add(more);
            if held {
                break;
            }
            assert!(round < 300, "{what}: never: {seen:?}\n{}", self.agent.log());
        }
        seen.print(what, granted, &self.flood);
        assert_eq!(seen.beyond(granted), BTreeSet::new(), "{what}\n{}", self.agent.log());
    }

    /// Nothing of the sandbox came beyond its grants since the last look, although there was no table: but over IPv6 to the node's
    /// own addresses, which routing cannot close.
    pub(crate) fn locked(&mut self, what: &str) {
        let before = self.looked_at;
        let mut seen = self.look();
        assert!(self.looked_at > before, "{what}: no round of the flood was sent");
        let [_, gateway] = GATEWAY;
        let open = |key: &str| {
            let to = key.split(" -> ").nth(1).unwrap_or_default();
            let at = |own: &&str| to == *own || to.starts_with(&format!("{own}:"));
            let here = [gateway, NODE6].iter().any(at);
            let members = |name: &&str| key.starts_with(*name) || to == *name;
            MEMBER.iter().any(members) || key.starts_with(ATTACKER[1]) && here
        };
        // For the trusted member nothing but the table stands between.
        seen.members.clear();
        seen.arrived.retain(|key, _| !open(key));
        let all = seen.passed.len();
        seen.passed.retain(|key, _| !open(key));
        println!(
            "{what}: {} kinds of the member's, or to the node itself over IPv6",
            all - seen.passed.len()
        );
        assert_eq!(
            seen.beyond(&Seen::granted(false)),
            BTreeSet::new(),
            "{what}\n{}",
            self.agent.log()
        );
    }
}

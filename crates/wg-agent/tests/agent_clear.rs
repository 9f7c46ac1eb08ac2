//! Nothing in clear: programs in pods and on the nodes send into the mesh all the time, over IPv4 and IPv6, while agents
//! come, go, crash and are replaced, Peers and keys change, and other hands tear at the node. A capture of the wire between
//! the nodes shows WireGuard and nothing of the mesh beside it, and the senders are told that there is no way instead.

#[allow(unreachable_pub, reason = "shared between test binaries")]
mod netns;
mod node;
mod sender;

use std::{
    net::IpAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use clustermesh_api::{names::KILO_KEY, policy::Allow, policy::PeerPolicy, policy::PeerPolicySpec};
use clustermesh_lab::{Running, wait_until};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use netns::NetNs;
use nix::sys::signal::Signal;
use node::{MGMT, SOON, TENANT, World, peer, wide};
use sender::{Sender, Told};

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a cluster has of IPv6; its IPv4 is the site's.
struct Six {
    pods: &'static str,
    wide: &'static str,
    gateway: &'static str,
    pod: &'static str,
    nobody: &'static str,
    underlay: &'static str,
}

const SIX: [Six; 2] = [
    Six {
        pods: "fd00:10:0:1::/64",
        wide: "fd00:10::/32",
        gateway: "fd00:10:0:1::1",
        pod: "fd00:10:0:1::9",
        nobody: "fd00:10:0:9::9",
        underlay: "fd00:30::1:11",
    },
    Six {
        pods: "fd00:20:0:1::/64",
        wide: "fd00:20::/32",
        gateway: "fd00:20:0:1::1",
        pod: "fd00:20:0:1::9",
        nobody: "fd00:20:0:9::9",
        underlay: "fd00:30::2:11",
    },
];
/// Pod, its gateway, and an address of the pod network that no node owns.
const FOUR: [[&str; 3]; 2] = [
    ["10.10.1.9", "10.10.1.1", "10.10.99.9"],
    ["10.20.1.9", "10.20.1.1", "10.20.99.9"],
];
/// Further addresses of the pod under test, of which each asks somebody else: in the order of [`Senders::asking`].
const ASKING: [&str; 3] = ["10.20.1.21", "10.20.1.22", "10.20.1.23"];
/// Every inner address, in tcpdump's language.
const INNER: &str = "net 10.10.0.0/16 or net 10.20.0.0/16 or net 100.66.0.0/16 or net fd00:10::/32 or net fd00:20::/32";

/// Two dual-stack clusters of a node and a pod each.
struct Clear {
    world: World,
    pods: [NetNs; 2],
}

impl Clear {
    async fn start() -> Self {
        let world = World::start().await;
        let pods = ["mgmt-pod", "tenant-pod"].map(NetNs::new);
        for index in [MGMT, TENANT] {
            dual_stack(&world, index, &pods[index]).await;
        }
        Self { world, pods }
    }

    fn pod(&self, index: usize) -> PathBuf {
        self.pods[index].path().into()
    }

    fn host(&self, index: usize) -> PathBuf {
        self.world.host(self.world.site(index)).netns()
    }

    /// What a controller writes into `target` about `source`, both families of it.
    async fn introduce(&self, target: usize, source: usize) {
        let (at, of) = (self.world.site(target), self.world.site(source));
        self.world
            .peers(at)
            .await
            .create(&PostParams::default(), &self.peer(source).await)
            .await
            .expect("create the Peer");
        let networks = vec![wide(of), of.wireguard.into(), SIX[source].wide.into()];
        let to = vec![wide(at), at.wireguard.into(), SIX[target].wide.into()];
        let allow = Allow { to };
        let spec = PeerPolicySpec {
            source: of.cluster.into(),
            sources: networks.clone(),
            networks,
            allow: vec![allow],
            ..PeerPolicySpec::default()
        };
        self.world
            .policies(at)
            .await
            .create(&PostParams::default(), &PeerPolicy::new("mesh", spec))
            .await
            .expect("create the PeerPolicy");
    }

    async fn peer(&self, source: usize) -> clustermesh_api::peer::Peer {
        let of = self.world.site(source);
        let mut peer = peer(of, &self.world.published(of).await);
        peer.metadata.name = Some("other".into());
        peer.spec.allowed_ips.push(SIX[source].pods.into());
        peer
    }

    async fn wireguard(&self, index: usize) -> IpAddr {
        let said = self.world.published(self.world.site(index)).await;
        let address = &said[clustermesh_api::names::KILO_WIREGUARD_IP];
        address.split('/').next().unwrap().parse().unwrap()
    }

    /// Those who send, by whether somebody can be there at all.
    async fn senders(&self) -> Senders {
        let (pod, host) = (self.pod(TENANT), self.host(TENANT));
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        let wireguard = self.wireguard(MGMT).await;
        let start = |from: &str, netns: &PathBuf, to: IpAddr| Sender::start(&format!("{from} -> {to}"), netns, to);
        let [there, _, nobody] = FOUR[MGMT];
        Senders {
            reach: vec![
                start("pod", &pod, at(there)),
                start("pod", &pod, at(SIX[MGMT].pod)),
                start("host", &host, at(there)),
            ],
            closed: vec![start("pod", &pod, wireguard), start("host", &host, wireguard)],
            back: vec![
                start("their pod", &self.pod(MGMT), at(FOUR[TENANT][0])),
                start("their pod", &self.pod(MGMT), at(SIX[TENANT].pod)),
                start("their host", &self.host(MGMT), at(FOUR[TENANT][0])),
            ],
            nobody: vec![
                start("pod", &pod, at(nobody)),
                start("pod", &pod, at(SIX[MGMT].nobody)),
                start("host", &host, at(nobody)),
                start("host", &host, at(SIX[MGMT].nobody)),
            ],
            asking: [there.to_owned(), wireguard.to_string(), nobody.to_owned()]
                .iter()
                .zip(ASKING)
                .map(|(to, source)| Sender::asking(&format!("pod, asking -> {to}"), &pod, at(source), at(to)))
                .collect(),
        }
    }

    async fn table_stands(&self, index: usize) {
        let host = self.world.host(self.world.site(index));
        wait_until("the firewall table", SOON, async || {
            let words = ["nft", "list", "table", "inet", "clustermesh"];
            match host.try_exec(words).await.map_err(|e| e.to_string())? {
                output if output.status.success() => Ok(()),
                output => Err(output.stderr),
            }
        })
        .await
        .unwrap();
    }

    /// Waits until table, rules and closed door are all there, and the device is up.
    async fn stands_again(&self, after: &str) {
        let host = self.world.host(self.world.site(TENANT));
        let interface = &self.world.site(TENANT).interface;
        let whole = format!(
            "nft list table inet clustermesh > /dev/null
            for f in -4 -6; do
                ip $f rule show | grep -q 'lookup 5182'
                ip $f rule show | grep -q 'lookup 5183'
                ip $f route show table 5182 | grep -q unreachable
                ip $f route show table 5182 | grep -q 'dev {interface}'
                ip $f route show table 5183 | grep -q 'dev {interface}'
            done
            ip link show dev {interface} up | grep -q UP"
        );
        wait_until(
            format!("everything to stand again after {after}"),
            SOON,
            async || match host.try_exec(["sh", "-exc", &whole]).await.map_err(|e| e.to_string())? {
                output if output.status.success() => Ok(()),
                output => Err(output.stderr),
            },
        )
        .await
        .unwrap();
    }

    fn agent(&self, index: usize, log: &str) -> Running {
        self.world.agent(self.world.site(index), log)
    }

    async fn tear(&self, line: &str) {
        let host = self.world.host(self.world.site(TENANT));
        host.exec(["sh", "-ec", line]).await.expect(line);
    }
}

/// The senders of a run.
struct Senders {
    /// From the node under test to what is there.
    reach: Vec<Sender>,
    /// To the other node's WireGuard address, where nothing is open.
    closed: Vec<Sender>,
    /// From the other cluster to the node under test.
    back: Vec<Sender>,
    /// From the node under test to mesh addresses that nobody has.
    nobody: Vec<Sender>,
    /// Pods that ask two who are there, then one who is not.
    asking: Vec<Sender>,
}

impl Senders {
    /// Waits until each that can be answered is.
    async fn answered(&self, why: &str) {
        let all = || self.reach.iter().chain(&self.back);
        let before: Vec<u64> = all().map(|sender| sender.told().answers).collect();
        let silent = async || {
            let late = all()
                .zip(&before)
                .filter(|(sender, before)| sender.told().answers <= **before);
            let late: Vec<_> = late.map(|(sender, _)| (&sender.name, sender.told())).collect();
            if late.is_empty() {
                Ok(())
            } else {
                Err(format!("{late:?}"))
            }
        };
        wait_until(format!("answers: {why}"), PATIENCE, silent).await.unwrap();
    }

    /// Waits until whoever sends from the node under test to somebody is told that there is no way, in every family.
    async fn told(&self, why: &str) {
        let all = self
            .reach
            .iter()
            .chain(&self.closed)
            .chain(&self.nobody)
            .chain(&self.asking);
        told(all.filter(|sender| !sender.name.starts_with("pod -> 1")), why).await;
    }

    /// Waits until whoever sends to nobody is told so.
    async fn told_of_nobody(&self, why: &str) {
        let all = self.nobody.iter().chain(self.asking.last());
        told(all.filter(|sender| !sender.name.starts_with("pod -> 1")), why).await;
    }
}

async fn told(senders: impl Iterator<Item = &Sender>, why: &str) {
    let before: Vec<(&Sender, Told)> = senders.map(|sender| (sender, sender.told())).collect();
    let silent = async || {
        let late = before
            .iter()
            .filter(|(sender, before)| sender.told().unreachable() <= before.unreachable());
        let late: Vec<_> = late.map(|(sender, _)| (&sender.name, sender.told())).collect();
        if late.is_empty() {
            Ok(())
        } else {
            Err(format!("{late:?}"))
        }
    };
    wait_until(
        format!("everybody to be told that there is no way: {why}"),
        PATIENCE,
        silent,
    )
    .await
    .unwrap();
}

/// Gives a site's node IPv6, forwarding, a pod, and a CNI that masquerades what leaves the cluster's pod network; and its
/// underlay a default route in both families, so that whatever escapes the mesh has somewhere to go.
async fn dual_stack(world: &World, index: usize, pod: &NetNs) {
    let (site, six) = (world.site(index), &SIX[index]);
    let [address, gateway, _] = FOUR[index];
    let nodes = world.nodes(site).await;
    let mut node: Node = nodes.get(site.node).await.expect("the Node");
    nodes
        .delete(site.node, &Default::default())
        .await
        .expect("delete the Node");
    (node.metadata.resource_version, node.metadata.uid) = (None, None);
    if let Some(spec) = &mut node.spec {
        spec.pod_cidrs = Some(vec![site.pods.into(), six.pods.into()]);
    }
    nodes
        .create(&PostParams::default(), &node)
        .await
        .expect("create it anew");
    let Six {
        wide: wide6, underlay, ..
    } = six;
    let (own, wide4) = (pod.path(), wide(site));
    let script = format!(
        "
        for f in all default; do echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; done
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
        ip addr add {underlay}/64 dev eth0 nodad
        ip -6 route add default via fd00:30::1 dev eth0
        ip -6 neigh add fd00:30::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
        ip link add cni0 type veth peer name eth0 netns {own}
        ip addr add {gateway}/24 dev cni0
        ip addr add {gateway6}/64 dev cni0 nodad
        ip link set cni0 up
        nft 'table ip cni {{ chain post {{ type nat hook postrouting priority 100; ip saddr {wide4} ip daddr != {wide4} masquerade; }}; }}'
        nft 'table ip6 cni {{ chain post {{ type nat hook postrouting priority 100; ip6 saddr {wide6} ip6 daddr != {wide6} masquerade; }}; }}'
        ",
        gateway6 = six.gateway,
    );
    world
        .host(site)
        .exec(["sh", "-ec", &script])
        .await
        .expect("set up the node");
    for f in ["all", "default"] {
        pod.set_sysctl(&format!("net/ipv6/conf/{f}/accept_dad"), "0");
    }
    pod.ip(&format!("addr add {address}/24 dev eth0"));
    pod.ip(&format!("addr add {}/64 dev eth0 nodad", six.pod));
    pod.ip("link set eth0 up");
    pod.ip(&format!("route add default via {gateway}"));
    pod.ip(&format!("-6 route add default via {}", six.gateway));
    for to in [address, six.pod] {
        sender::echo(&PathBuf::from(pod.path()), to.parse().unwrap());
    }
    for more in ASKING.iter().filter(|_| index == TENANT) {
        pod.ip(&format!("addr add {more}/24 dev eth0"));
    }
}

// threat: unencrypted-packet
#[tokio::test]
async fn mesh_packets_never_leave_unencrypted() {
    let clear = Clear::start().await;
    let world = &clear.world;
    let (mgmt, tenant) = (world.site(MGMT), world.site(TENANT));
    let mut their = clear.agent(MGMT, "mgmt");
    let mut ours = clear.agent(TENANT, "tenant");
    clear.introduce(MGMT, TENANT).await;
    clear.introduce(TENANT, MGMT).await;
    world.ready(mgmt).await;
    sender::echo(&clear.host(MGMT), clear.wireguard(MGMT).await);

    // Before any mesh: the wire shows all of it, and so would whatever follows.
    ours.terminate(SOON).await.expect("it ends");
    let cleanup = world.command(tenant, &["cleanup"]);
    world.host(tenant).exec(cleanup).await.expect("cleanup");
    let senders = clear.senders().await;
    in_clear(&clear, "before", "no mesh").await;

    let began = Instant::now();
    let step = |what: &str| println!("{:6.1} s {what}", began.elapsed().as_secs_f64());
    // From the moment the table stands, until the end.
    ours = clear.agent(TENANT, "tenant-1");
    clear.table_stands(TENANT).await;
    let filter = format!("({INNER}) and not udp port 51820");
    let capture = world.lab.capture("clear", &filter).await.expect("start a capture");
    step("the table stands");
    senders.answered("the first start").await;
    senders.told_of_nobody("nobody has this address").await;

    step("the peer goes down");
    their.signal(Signal::SIGKILL).expect("kill");
    their.ends(SOON).await.expect("dead");
    let host = senders
        .back
        .iter()
        .filter(|sender| sender.name.starts_with("their host"));
    told(host, "their agent is dead").await;
    their = clear.agent(MGMT, "mgmt-2");
    senders.answered("the peer is back").await;

    step("the Peer is deleted");
    world.delete_peer(tenant, "other").await;
    senders.told("no Peer has these addresses").await;
    let again = clear.peer(MGMT).await;
    let peers = world.peers(tenant).await;
    peers.create(&PostParams::default(), &again).await.expect("create");
    senders.answered("the Peer is back").await;

    step("the peer's key changes");
    let real = world.published(mgmt).await[KILO_KEY].clone();
    let wrong = clustermesh_core::key::PublicKey::new([77; 32]).to_string();
    let key = async |key: &str| {
        let patch = serde_json::json!({"spec": {"publicKey": key}});
        let patch = Patch::Merge(&patch);
        peers
            .patch("other", &PatchParams::default(), &patch)
            .await
            .expect("patch");
    };
    key(&wrong).await;
    wait_until("the device to have it", SOON, async || {
        let (_, state) = world.page(tenant, "/debug/state").await;
        if state.contains(&wrong) { Ok(()) } else { Err(state) }
    })
    .await
    .unwrap();
    key(&real).await;
    senders.answered("the key is the right one again").await;

    step("the agent is stopped");
    ours.terminate(SOON).await.expect("it ends");
    senders.told("the agent is stopped").await;
    ours = clear.agent(TENANT, "tenant-2");
    senders.answered("started again").await;

    step("upgraded");
    // Another file, started as soon as the old one has let go.
    let files = tempfile::tempdir().expect("a directory");
    let newer = files.path().join("wg-agent");
    std::fs::copy(node::AGENT, &newer).expect("copy the program");
    ours.terminate(SOON).await.expect("it ends");
    let mut words = world.command(tenant, &[]);
    words[0] = newer.display().to_string();
    ours = world
        .host(tenant)
        .spawn("tenant-3", words)
        .expect("start the newer one");
    senders.answered("upgraded").await;

    step("killed, again and again");
    ours.signal(Signal::SIGKILL).expect("kill");
    ours.ends(SOON).await.expect("dead");
    for (round, milliseconds) in [0, 20, 60, 120, 250, 500, 1000].into_iter().enumerate() {
        let mut crashing = clear.agent(TENANT, &format!("tenant-crash-{round}"));
        // Wherever it is by then.
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        let _ = crashing.signal(Signal::SIGKILL);
        crashing.ends(SOON).await.expect("dead");
    }
    senders.told("it does not come up").await;

    step("its API server is down");
    let cluster = world.lab.cluster(tenant.cluster);
    cluster.kill_api().expect("kill the API server");
    ours = clear.agent(TENANT, "tenant-4");
    senders.told_of_nobody("the API server is down").await;
    ours.signal(Signal::SIGKILL).expect("kill");
    ours.ends(SOON).await.expect("dead");
    ours = clear.agent(TENANT, "tenant-5");
    cluster.start_api().await.expect("start the API server");
    senders.answered("it has read from its API server").await;

    for line in [
        "nft flush ruleset",
        "nft delete table inet clustermesh",
        "for f in -4 -6; do ip $f rule del pref 1000; ip $f rule del pref 1001; done",
        "for f in -4 -6; do ip $f route flush table 5182; ip $f route flush table 5183; done",
        &format!("ip link del {}", tenant.interface),
        &format!("ip link set {} down", tenant.interface),
    ] {
        step(line);
        clear.tear(line).await;
        // One hand at a time: what keeps the node closed while one part is gone are the others.
        clear.stands_again(line).await;
        senders.answered(line).await;
    }
    step("end");

    let seen = capture.stop().await.expect("the capture ends");
    let seen = seen.packets("").await.expect("read it");
    assert_eq!(
        seen.iter().take(20).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "{} packets in clear",
        seen.len()
    );
    drop(their);
    // And the wire would have shown it.
    ours.terminate(SOON).await.expect("it ends");
    let cleanup = world.command(tenant, &["cleanup"]);
    world.host(tenant).exec(cleanup).await.expect("cleanup");
    in_clear(&clear, "after", "nothing of ours is left").await;
}

/// Waits until a capture shows the senders' packets, of each family.
async fn in_clear(clear: &Clear, name: &str, why: &str) {
    for (family, net) in [("ip", wide(clear.world.site(MGMT))), ("ip6", SIX[MGMT].wide.to_owned())] {
        let capture = clear
            .world
            .lab
            .capture(&format!("{name}-{family}"), &format!("{family} and dst net {net}"))
            .await
            .expect("start a capture");
        tokio::time::sleep(Duration::from_millis(500)).await;
        let seen = capture.stop().await.expect("the capture ends").packets("").await;
        assert_ne!(seen.expect("read it"), Vec::<String>::new(), "{family}, {why}");
    }
}

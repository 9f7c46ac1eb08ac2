//! Disturbs a gateway and its cluster, while a sandbox scans every socket through that gateway continuously: kills the
//! gateway's container, deletes its nftables table, its pod and its SandboxAccess, stops the controller and the API server,
//! and cuts the power of the gateway's node. Sockets without a grant must never answer.

use std::{collections::BTreeSet, net::SocketAddr};

use clustermesh_lab::{Attacker, GATEWAYS, NAMESPACE, Node, RepeatedScan, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use super::{
    TestEnv,
    gateways::{Gateway, access_name},
};
use crate::setup::{PATIENCE, json as get};

/// Number of times that the gateway's table is deleted.
const DELETIONS: usize = 15;
/// Gateway ports of the grants that are added by hand.
const ADDED_PORTS: [u16; 2] = [20_443, 20_053];

/// The disturbed gateway, and the running scans.
pub(super) struct ScannedGateway<'a> {
    env: &'a TestEnv<'a>,
    gateway: Gateway,
    node: Node<'a>,
    /// The gateway's granted sockets.
    pub(super) granted: BTreeSet<SocketAddr>,
    all_sockets: BTreeSet<SocketAddr>,
    scans: Vec<RepeatedScan>,
}

/// Returns the gateway, with running scans, after the last step.
// threat: gateway-ungranted
pub(super) async fn disturbed_gateway_opens_no_other_port<'a>(
    env: &'a TestEnv<'a>,
    attacker: &Attacker<'_>,
) -> ScannedGateway<'a> {
    let peer = attacker.peers.last().unwrap();
    let scanned = ScannedGateway::new(env, env.gateway_of(peer).await).await;
    scanned.wait_until_settled("at the start").await;

    scanned.kill_container().await;
    scanned.wait_until_settled("after SIGKILL of the gateway").await;
    let nft = ["nft", "flush", "table", "inet", "clustermesh"];
    let flushed = scanned.node.pod_exec(scanned.gateway.pod.ip, nft).await.unwrap();
    assert!(flushed.status.success(), "{flushed:?}");
    scanned.wait_until_settled("after nft flush table").await;
    drop(scanned);
    deleted_table_opens_nothing(ScannedGateway::new(env, env.gateway_of(peer).await).await).await;
    let scanned = ScannedGateway::new(env, env.gateway_of(peer).await).await;

    let delete = ["-n", GATEWAYS, "delete", "pod", &scanned.gateway.pod.name];
    env.hub.kubectl(delete).await.unwrap();
    scanned.update_key(attacker, peer).await;
    scanned.wait_until_settled("after the gateway's pod was deleted").await;

    widened_access_opens_nothing_without_controller(&scanned, attacker).await;

    env.hub.kill_api().unwrap();
    scanned.kill_container().await;
    scanned.scan_once_more().await;
    env.hub.start_api().await.unwrap();
    scanned
        .wait_until_settled("after a start of the gateway while its API server was down")
        .await;

    scanned.node.power_cut().await.unwrap();
    scanned.node.power_on().await.unwrap();
    env.hub.wait_for_rollout("default", "deployment/web").await.unwrap();
    scanned.update_key(attacker, peer).await;
    scanned.assert_only_granted_answered();
    // After the restart, pods of that node have new addresses. The attacker routes the addresses of all sockets through the gateway's
    // Peer again.
    let addresses = env.all_sockets().await.keys().map(SocketAddr::ip).collect();
    let kept_on_underlay = attacker.route_through(peer, &addresses).await.unwrap();
    assert_eq!(kept_on_underlay, BTreeSet::new());
    let scanned = ScannedGateway::new(env, env.gateway_of(peer).await).await;
    scanned.wait_until_settled("after the node was restarted").await;
    scanned
}

// threat: gateway-port
async fn deleted_table_opens_nothing(scanned: ScannedGateway<'_>) {
    let delete = async || {
        let args = ["nft", "delete", "table", "inet", "clustermesh"];
        scanned.node.pod_exec(scanned.gateway.pod.ip, args).await.unwrap()
    };
    // The table is missing only for a moment and a scan probes each socket once a second, so repeat the deletion.
    // A deletion succeeds only after the gateway has restored the table.
    for _ in 0..DELETIONS {
        wait_until("the table to be restored", PATIENCE, async || {
            let deleted = delete().await;
            if deleted.status.success() {
                Ok(())
            } else {
                Err(deleted.stderr)
            }
        })
        .await
        .unwrap();
    }
    scanned
        .wait_until_settled(&format!("after {DELETIONS} times nft delete table"))
        .await;

    // A stopped gateway cannot restore its table, so the scans run while it has no nftables table.
    scanned.signal(Signal::SIGSTOP);
    let deleted = delete().await;
    assert!(deleted.status.success(), "{deleted:?}");
    scanned.scan_once_more().await;
    scanned.signal(Signal::SIGCONT);
    scanned
        .wait_until_settled("after nft delete table while the gateway was stopped")
        .await;
}

async fn widened_access_opens_nothing_without_controller(scanned: &ScannedGateway<'_>, attacker: &Attacker<'_>) {
    let hub = &scanned.env.hub;
    let scale =
        |replicas: &str| ["-n", NAMESPACE, "scale", "deployment/clustermesh-controller", replicas].map(str::to_owned);
    hub.kubectl(scale("--replicas=0")).await.unwrap();
    let gone = [
        "-n",
        NAMESPACE,
        "wait",
        "--for=delete",
        "pod",
        "-l",
        "app.kubernetes.io/name=clustermesh-controller",
        "--timeout=60s",
    ];
    hub.kubectl(gone).await.unwrap();
    // Add grants for the API server, and for a Service in a namespace that gateways may not read.
    let access = scanned.env.access().await;
    let mut grants = access["spec"]["grants"].as_array().unwrap().clone();
    let services = [
        ("default", "kubernetes", "https"),
        ("kube-system", "kube-dns", "dns-tcp"),
    ];
    grants.extend(services.into_iter().zip(ADDED_PORTS).map(|((namespace, name, port), gateway_port)| {
        json!({"service": {"namespace": namespace, "name": name}, "port": port, "gatewayPort": gateway_port})
    }));
    let wide = json!({"spec": {"grants": grants}}).to_string();
    let name = access_name();
    let widen = ["patch", "sandboxaccess", &name, "--type=merge", "-p", &wide];
    let refused = hub.try_kubectl(widen).await.unwrap();
    assert!(refused.stderr.contains("ValidatingAdmissionPolicy"), "{refused:?}");
    // Without its binding, the admission policy is not enforced.
    let admission = ["delete", "validatingadmissionpolicybinding", "clustermesh-objects"];
    hub.kubectl(admission).await.unwrap();
    wait_until("the SandboxAccess to be widened by hand", PATIENCE, async || {
        let widened = hub.try_kubectl(widen).await.map_err(|error| error.to_string())?;
        if widened.status.success() {
            Ok(())
        } else {
            Err(widened.stderr)
        }
    })
    .await
    .unwrap();
    let generation = scanned.env.access().await["metadata"]["generation"].clone();
    wait_until("the gateway to refuse the added grants", PATIENCE, async || {
        let gateway = get(
            hub,
            &["-n", GATEWAYS, "get", "sandboxgateway", &scanned.gateway.pod.name],
        )
        .await;
        let status = &gateway["status"];
        let refused = status["refused"].as_array().map_or(0, Vec::len);
        if status["applied"][0]["generation"] == generation && refused == ADDED_PORTS.len() {
            Ok(())
        } else {
            Err(status.to_string())
        }
    })
    .await
    .unwrap();
    scanned.scan_once_more().await;
    hub.kubectl(["delete", "sandboxaccess", &name]).await.unwrap();
    for from in scanned.env.clients() {
        scanned
            .env
            .lab
            .wait_for_closed_sockets(&from, &scanned.granted)
            .await
            .unwrap();
    }
    scanned.scan_once_more().await;
    // The attacker has revoked the controller's access to the sandbox. Without read access, a restarted controller does
    // not know the sandbox's nodes, and so cannot write the SandboxAccess again.
    attacker.grant_read_access().await.unwrap();
    hub.kubectl(scale("--replicas=1")).await.unwrap();
    hub.wait_for_rollout(NAMESPACE, "deployment/clustermesh-controller")
        .await
        .unwrap();
    scanned
        .wait_until_settled("after a SandboxAccess was widened and deleted by hand, without a controller")
        .await;
}

impl<'a> ScannedGateway<'a> {
    /// Scans from the sandbox's pod and from its node.
    async fn new(env: &'a TestEnv<'a>, gateway: Gateway) -> Self {
        let mut all = env.all_sockets().await;
        all.extend(ADDED_PORTS.map(|port| (SocketAddr::new(gateway.address, port), "widened".to_owned())));
        println!("scanning {} sockets continuously", all.len());
        let scan = |from| env.lab.scan_repeatedly(&from, all.keys().copied()).unwrap();
        let granted = env.granted().await.into_iter();
        Self {
            env,
            node: env.lab.node(&gateway.pod.node),
            granted: granted.filter(|socket| socket.ip() == gateway.address).collect(),
            all_sockets: all.keys().copied().collect(),
            scans: env.clients().map(scan).into(),
            gateway,
        }
    }

    /// Pids of the gateway. Its init container (`wg-agent prepare`) and the agent of the node have the same process name.
    fn pids(&self) -> Vec<i32> {
        let gateway = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let args: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            args.contains(&&b"--mode=gateway"[..]) && !args.contains(&&b"prepare"[..])
        };
        let pids = self.node.pids_of("wg-agent").unwrap().into_iter();
        pids.filter(gateway).collect()
    }

    fn signal(&self, signal: Signal) {
        let pids = self.pids();
        assert_eq!(pids.len(), 1, "{pids:?}");
        kill(Pid::from_raw(pids[0]), signal).unwrap();
    }

    /// Kills the container and waits until the kubelet has started it again.
    async fn kill_container(&self) {
        let old = self.pids();
        self.signal(Signal::SIGKILL);
        wait_until("a new process", PATIENCE, async || match self.pids() {
            now if now.is_empty() || now == old => Err(format!("{now:?}, was {old:?}")),
            _ => Ok(()),
        })
        .await
        .unwrap();
    }

    /// Waits for the key of a new gateway pod and writes it into the sandbox's Peer. The controller cannot do this,
    /// because the attacker has revoked its write access to the sandbox.
    async fn update_key(&self, attacker: &Attacker<'_>, peer: &str) {
        let name = &self.gateway.pod.name;
        let old = get(&self.env.sandbox, &["get", "peer", peer]).await["spec"]["publicKey"].clone();
        let key = wait_until("the gateway's new key", PATIENCE, async || {
            let object = get(&self.env.hub, &["-n", GATEWAYS, "get", "sandboxgateway", name]).await;
            match object["status"]["publicKey"].as_str() {
                Some(key) if old != key => Ok(key.to_owned()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap();
        attacker.set_public_key(peer, &key).await.unwrap();
    }

    /// Waits until every socket has been scanned once more, and checks that only granted sockets have answered.
    pub(super) async fn scan_once_more(&self) {
        for scan in &self.scans {
            scan.wait_for_another_round().await.unwrap();
        }
        self.assert_only_granted_answered();
    }

    fn assert_only_granted_answered(&self) {
        for scan in &self.scans {
            let opened = scan.opened();
            let unexpected: BTreeSet<_> = opened.difference(&self.granted).collect();
            assert_eq!(unexpected, BTreeSet::new(), "granted {:?}", self.granted);
        }
    }

    /// Checks with new scans that no socket at all is open, not even one that was granted before. The running scans may
    /// have seen it open while it was granted.
    pub(super) async fn assert_nothing_answers(&self, when: &str) {
        let found = self.env.scan_from_sandbox(self.all_sockets.iter().copied()).await;
        assert_eq!(found, [BTreeSet::new(), BTreeSet::new()], "{when}");
        println!("{when}: none of {} sockets answers", self.all_sockets.len());
    }

    /// Waits until all granted sockets answer again, and checks that no other socket has answered since the scans began.
    pub(super) async fn wait_until_settled(&self, when: &str) {
        for from in self.env.clients() {
            let open = self.env.lab.wait_for_open_sockets(&from, &self.granted).await;
            open.unwrap_or_else(|error| panic!("{when}: {error}"));
        }
        self.scan_once_more().await;
        println!("{when}: {:?} and nothing else answered", self.scans[0].opened());
    }
}

//! Shows an attack by the administrator of the sandbox, who routes every address of the other two clusters into the tunnel and scans
//! these addresses: with the grant, and after the revocation of the grant.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use clustermesh_lab::{Attacker, EchoWatch, Gateway};
use futures::future::try_join_all;

use super::{Demo, HUB, OpenSockets, SANDBOX, Scene};

/// A UDP flow counts as ended if no answer arrives for this time.
const SILENCE: Duration = Duration::from_secs(1);
/// The beginning of an address's description, and the printed name of such addresses.
const KINDS: [(&str, &str); 8] = [
    ("node ", "of nodes"),
    ("WireGuard ", "of nodes' tunnels"),
    ("pods' default gateway ", "of pods' default gateways"),
    ("pod ", "of pods"),
    ("Service ", "of Services and load balancers"),
    ("the API server", "of API servers"),
    ("an endpoint ", "of other endpoints"),
    ("gateway ", "of gateways for sandboxes"),
];

impl Demo<'_> {
    /// Scans through one gateway after the other, and revokes the grant while every scanned address is routed through the last gateway.
    pub(super) async fn attack_through_tunnel(&mut self, scene: &Scene<'_>) -> anyhow::Result<()> {
        self.title(
            "root of the cluster notebooks attacks: it revokes the controller's rights, and routes every address into the tunnel",
        );
        let node = scene
            .sandbox
            .nodes()
            .first()
            .context("notebooks has no node")?
            .name()
            .to_owned();
        let attacker = Attacker::new(scene.lab, SANDBOX, &node).await?;
        // `Attacker::new` has run this command.
        println!("$ kubectl --context {SANDBOX} delete clusterrolebinding clustermesh-member");
        let mut sockets = scene
            .sandbox
            .foreign_sockets(&[&scene.hub, &scene.member], &BTreeSet::new())
            .await?;
        scene.grant.add_gateway_sockets(&mut sockets);
        let addresses: BTreeSet<IpAddr> = sockets.keys().map(SocketAddr::ip).collect();
        print_scan_scope(&sockets, &addresses);
        let mut scanned = BTreeMap::new();
        for gateway in &scene.grant.gateways {
            let (peer, name) = (&gateway.peer, &gateway.name);
            println!(
                "$ kubectl --context {SANDBOX} patch peer {peer} --type=merge -p '{{\"spec\": {{\"allowedIPs\": [{} addresses]}}}}'",
                addresses.len()
            );
            let kept_on_underlay = attacker.route_through(peer, &addresses).await?;
            for ip in &kept_on_underlay {
                println!(
                    "  The agent of notebooks keeps {ip} on eth0, although a Peer contains it, because it is \
                     the node's next hop. The scan with unchanged routes included it."
                );
            }
            scanned = sockets.clone();
            scanned.retain(|socket, _| !kept_on_underlay.contains(&socket.ip()));
            let granted = OpenSockets::granted(&scene.grant.through(gateway));
            for from in &scene.clients {
                // Wait for a session: without a session, WireGuard stages only some of the first packets of a scan and drops the others.
                scene.lab.wait_for_open_sockets(from, &granted.tcp).await?;
            }
            let found = self.scan_all(scene, &scanned, &granted).await?;
            for (from, found) in scene.clients.iter().zip(found) {
                let outcome = if found == granted {
                    Ok(format!("{found}: exactly the grant"))
                } else {
                    Err(format!("{found}; granted: {granted}"))
                };
                self.check(&format!("{from}, through {name}"), outcome);
            }
        }
        let last = scene.grant.gateways.last().context("mgmt has no gateway")?;
        self.revoke_grant(scene, &scanned, last).await
    }

    async fn scan_all(
        &self,
        scene: &Scene<'_>,
        scanned: &BTreeMap<SocketAddr, String>,
        wanted: &OpenSockets,
    ) -> anyhow::Result<Vec<OpenSockets>> {
        let scans = scene
            .clients
            .iter()
            .map(|from| OpenSockets::scan_with_retries(scene.lab, from, scanned.keys().copied(), wanted));
        try_join_all(scans).await
    }

    /// Revokes the grant, and measures how long it remains usable. The addresses in `scanned` are routed through `gateway`.
    async fn revoke_grant(
        &mut self,
        scene: &Scene<'_>,
        scanned: &BTreeMap<SocketAddr, String>,
        gateway: &Gateway,
    ) -> anyhow::Result<()> {
        self.title("the grant is revoked: the controller still writes in mgmt, and that is enough");
        let granted = OpenSockets::granted(&scene.grant.through(gateway));
        let socket = *granted.udp.first().context("no UDP port is granted")?;
        let watch = |from| scene.lab.watch_udp(from, socket);
        let watches: Vec<EchoWatch> = scene.clients.iter().map(watch).collect::<Result<_, _>>()?;
        for watch in &watches {
            watch.wait_for_echo_after(now()?).await?;
        }
        let mesh = scene.product.mesh_with(&[SANDBOX], &[]);
        println!(
            "$ kubectl --context {HUB} apply -f -   # the same mesh without egress; every 10 ms a datagram is sent to {socket}/UDP"
        );
        let changed_at = now()?;
        scene.hub.apply(&mesh).await?;
        let mut last_answers = Vec::new();
        for (from, watch) in scene.clients.iter().zip(&watches) {
            let last = watch.wait_for_silence(SILENCE).await?;
            let after = last.unwrap_or_default().saturating_sub(changed_at);
            self.check(
                &format!("{from}: the last answer arrived"),
                Ok(format!("{after} ms after kubectl was called")),
            );
            last_answers.push(last);
        }
        let found = self.scan_all(scene, scanned, &OpenSockets::default()).await?;
        for ((from, found), (watch, last)) in scene.clients.iter().zip(found).zip(watches.iter().zip(last_answers)) {
            let outcome = match watch.echo_times().pop() {
                again if again != last => Err(format!("it answered again at {again:?}, after {last:?}")),
                _ if found != OpenSockets::default() => Err(found.to_string()),
                _ => Ok(format!("none of {} sockets answers", scanned.len())),
            };
            self.check(&format!("{from}, through {}", gateway.name), outcome);
        }
        Ok(())
    }
}

fn print_scan_scope(sockets: &BTreeMap<SocketAddr, String>, addresses: &BTreeSet<IpAddr>) {
    let descriptions: BTreeMap<IpAddr, &String> = sockets.iter().map(|(socket, what)| (socket.ip(), what)).collect();
    let count = |begins: &str| descriptions.values().filter(|what| what.starts_with(begins)).count();
    let kinds = KINDS.map(|(begins, words)| (count(begins), words));
    let kinds = kinds.into_iter().filter(|(count, _)| *count > 0);
    let kinds: Vec<String> = kinds.map(|(count, words)| format!("{count} {words}")).collect();
    let ports: BTreeSet<u16> = sockets.keys().map(SocketAddr::port).collect();
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    println!(
        "  {} addresses of mgmt and tenant-a: {}",
        addresses.len(),
        kinds.join(", ")
    );
    println!(
        "  each at {} ports, TCP and UDP: all that are open at any of them, including NodePorts:",
        ports.len()
    );
    println!("    {}", ports.join(" "));
    println!("  (etcd in the lab listens only at loopback; its ports 2379 and 2380 are scanned, too.)");
}

/// Milliseconds since 1970, like the times of [`EchoWatch::echo_times`].
fn now() -> anyhow::Result<u128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())
}

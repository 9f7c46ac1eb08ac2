//! Shows an attack by the sandbox's administrator, who routes every address into the tunnel and scans it: with the grant, and after its
//! revocation.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use clustermesh_lab::{Attacker, Echo, Gateway};
use futures::future::try_join_all;

use super::{Demo, HUB, OpenSockets, SANDBOX, Scene};

/// A flow without an answer for this time counts as closed.
const SILENCE: Duration = Duration::from_secs(1);
/// The kind of an address, by the first words of its description.
const KINDS: [(&str, &str); 8] = [
    ("node ", "of nodes"),
    ("WireGuard ", "of nodes' tunnels"),
    ("pods' gateway ", "of pods' gateways"),
    ("pod ", "of pods"),
    ("Service ", "of Services and load balancers"),
    ("the API server", "of API servers"),
    ("an endpoint ", "of other endpoints"),
    ("gateway ", "of gateways in the tunnel"),
];

impl Demo<'_> {
    /// Scans through each gateway in turn, and revokes the grant while everything is routed through the last one.
    pub(super) async fn attack_through_tunnel(&mut self, scene: &Scene<'_>) -> anyhow::Result<()> {
        self.title(
            "root of notebooks attacks: it revokes the controller's rights, and routes everything into the tunnel",
        );
        let worker = scene
            .sandbox
            .nodes()
            .first()
            .context("notebooks has no node")?
            .name()
            .to_owned();
        let attacker = Attacker::new(scene.lab, SANDBOX, &worker).await?;
        println!("$ kubectl --context {SANDBOX} delete clusterrolebinding clustermesh-member");
        let mut every = scene
            .sandbox
            .sockets_beyond(&[&scene.hub, &scene.member], &BTreeSet::new())
            .await?;
        scene.through.add_to(&mut every);
        let addresses: BTreeSet<IpAddr> = every.keys().map(SocketAddr::ip).collect();
        print_what_is_scanned(&every, &addresses);
        let mut all = BTreeMap::new();
        for gateway in &scene.through.gateways {
            let (chosen, name) = (&gateway.peer, &gateway.name);
            println!(
                "$ kubectl --context {SANDBOX} patch peer {chosen} --type=merge -p '{{\"spec\": {{\"allowedIPs\": [{} addresses]}}}}'",
                addresses.len()
            );
            let left = attacker.leads_through(chosen, &addresses).await?;
            for ip in &left {
                println!(
                    "  Its own agent keeps {ip} on eth0 although a Peer contains it: its next hop, scanned above."
                );
            }
            all = every.clone();
            all.retain(|socket, _| !left.contains(&socket.ip()));
            let granted = OpenSockets::granted(&scene.through.through(gateway));
            for from in &scene.askers {
                // Wait for a session: without one, WireGuard stages only some of a scan's first packets and drops the others.
                scene.lab.until_open(from, &granted.tcp).await?;
            }
            let found = self.scan_all(scene, &all, &granted).await?;
            for (from, found) in scene.askers.iter().zip(found) {
                let outcome = if found == granted {
                    Ok(format!("{found}: what is granted, and nothing else"))
                } else {
                    Err(format!("{found}; granted: {granted}"))
                };
                self.check(&format!("{from}, all of it through {name}"), outcome);
            }
        }
        let last = scene.through.gateways.last().context("mgmt has no gateway")?;
        self.revoke_grant(scene, &all, last).await
    }

    async fn scan_all(
        &self,
        scene: &Scene<'_>,
        all: &BTreeMap<SocketAddr, String>,
        wanted: &OpenSockets,
    ) -> anyhow::Result<Vec<OpenSockets>> {
        let scans = scene
            .askers
            .iter()
            .map(|from| OpenSockets::scan_with_retries(scene.lab, from, all.keys().copied(), wanted));
        try_join_all(scans).await
    }

    /// Revokes the grant, and measures how long it stays usable. `gateway` is the one through which everything is routed.
    async fn revoke_grant(
        &mut self,
        scene: &Scene<'_>,
        all: &BTreeMap<SocketAddr, String>,
        gateway: &Gateway,
    ) -> anyhow::Result<()> {
        self.title("the grant is taken back: the controller still writes in mgmt, where that is enough");
        let granted = OpenSockets::granted(&scene.through.through(gateway));
        let socket = *granted.udp.first().context("nothing is granted there")?;
        let watch = |from| scene.lab.watch_udp(from, socket);
        let watches: Vec<Echo> = scene.askers.iter().map(watch).collect::<Result<_, _>>()?;
        for watch in &watches {
            watch.answered_after(now()?).await?;
        }
        let mesh = scene.product.mesh_with(&[SANDBOX], &[]);
        println!("$ kubectl --context {HUB} apply -f -   # the same without egress; {socket}/UDP is asked every 10 ms");
        let changed_at = now()?;
        scene.hub.apply(&mesh).await?;
        let mut lasts = Vec::new();
        for (from, watch) in scene.askers.iter().zip(&watches) {
            let last = watch.silent_for(SILENCE).await?;
            let after = last.unwrap_or_default().saturating_sub(changed_at);
            self.check(
                &format!("{from}: the last packet came"),
                Ok(format!("{after} ms after kubectl was called")),
            );
            lasts.push(last);
        }
        let found = self.scan_all(scene, all, &OpenSockets::default()).await?;
        for ((from, found), (watch, last)) in scene.askers.iter().zip(found).zip(watches.iter().zip(lasts)) {
            let outcome = match watch.answers().pop() {
                again if again != last => Err(format!("it answers again, {again:?} after {last:?}")),
                _ if found != OpenSockets::default() => Err(found.to_string()),
                _ => Ok(format!("of {} sockets nothing answers", all.len())),
            };
            self.check(&format!("{from}, all of it through {}", gateway.name), outcome);
        }
        Ok(())
    }
}

fn print_what_is_scanned(all: &BTreeMap<SocketAddr, String>, addresses: &BTreeSet<IpAddr>) {
    let owners: BTreeMap<IpAddr, &String> = all.iter().map(|(socket, what)| (socket.ip(), what)).collect();
    let count = |begins: &str| owners.values().filter(|what| what.starts_with(begins)).count();
    let kinds = KINDS.map(|(begins, words)| (count(begins), words));
    let kinds = kinds.into_iter().filter(|(count, _)| *count > 0);
    let kinds: Vec<String> = kinds.map(|(count, words)| format!("{count} {words}")).collect();
    let ports: BTreeSet<u16> = all.keys().map(SocketAddr::port).collect();
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    println!(
        "  {} addresses of mgmt and tenant-a: {}",
        addresses.len(),
        kinds.join(", ")
    );
    println!(
        "  each at {} ports, TCP and UDP, which are all that are open anywhere there, NodePorts too:",
        ports.len()
    );
    println!("    {}", ports.join(" "));
    println!("  (The lab's etcd listens at the loopback of its own machine: 2379 and 2380 are scanned, too.)");
}

/// Milliseconds since 1970, as in an [`Echo`]'s answers.
fn now() -> anyhow::Result<u128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())
}

//! `cargo xtask demo --scenario sandbox`: a cluster of untrusted code reaches the Service that is named for it and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use anyhow::Context;
use clustermesh_lab::{Asker, INFRASTRUCTURE, LabPlan, Product, Tunnel, WEB};

use super::{Demo, HUB, MEMBER, described};

const SANDBOX: &str = "notebooks";
const GRANT: &str =
    "[{service: {cluster: mgmt, namespace: default, name: web}, as: {namespace: default, name: hub-web}}]";

/// The hub, a trusted member, and the sandbox, whose worker is a pod of the hub.
pub(super) fn plan() -> LabPlan {
    LabPlan::clusters(&[(HUB, 2), (MEMBER, 1), (SANDBOX, 1)])
        .with_workers_in_pods(SANDBOX, HUB, 1)
        .with_policies(HUB)
}

impl Demo<'_> {
    /// Shows it.
    pub(super) async fn sandbox(&mut self) -> anyhow::Result<()> {
        let [hub, member, sandbox] = [HUB, MEMBER, SANDBOX].map(|name| self.lab.cluster(name));
        self.title("install: crds/ and deploy/, with kubectl as README.md tells");
        let clusters = [HUB, MEMBER, SANDBOX];
        let product = Product::install(self.lab, &clusters, Tunnel::Shipped, &|line| println!("  {line}")).await?;
        let hub_webs = hub.run_web().await?;
        for cluster in [&member, &sandbox] {
            cluster.apply(&WEB.replace("replicas: 2", "replicas: 1")).await?;
            cluster.rollout("default", "deployment/web").await?;
        }

        self.title("one ClusterMesh: notebooks is a sandbox with one grant");
        let mesh = product.mesh_with(&[SANDBOX], &[(SANDBOX, GRANT)]);
        println!("{mesh}");
        let applied = Instant::now();
        product.mesh_up(&mesh).await?;
        println!("  Ready {:.1} s after kubectl apply", applied.elapsed().as_secs_f64());

        self.title("the Service answers under its name");
        let webs = sandbox.webs().await?;
        let service = sandbox.cluster_ip("default", "hub-web").await?;
        let askers = webs
            .iter()
            .flat_map(|web| [Asker::Pod(web.clone()), Asker::Host(web.node.clone())]);
        let askers: Vec<Asker> = askers.collect();
        for from in &askers {
            let answer = self.lab.ask_until_answered(from, &format!("http://{service}")).await;
            self.check(&format!("{from} -> hub-web ({service})"), described(answer));
        }
        let granted: BTreeSet<SocketAddr> = hub_webs.iter().map(|web| SocketAddr::new(web.ip, 8080)).collect();
        for from in &askers {
            self.lab.until_open(from, &granted).await?;
        }
        println!(
            "  every endpoint answers {:.1} s after kubectl apply",
            applied.elapsed().as_secs_f64()
        );
        let policy = format!("demo--{SANDBOX}");
        println!("$ kubectl --context {HUB} get peerpolicy {policy} -o yaml   # what the sandbox may reach there");
        println!(
            "{}",
            hub.kubectl(["get", "peerpolicy", &policy, "-o", "yaml"]).await?.stdout
        );

        self.title("a scan of every address of mgmt and tenant-a, at every TCP port that is open anywhere there");
        let boundary = self.lab.boundary(SANDBOX)?;
        let admitted = boundary.admitted().await?;
        let all = boundary.sockets(&[&member], &granted).await?;
        println!(
            "  Its worker is a pod of mgmt, as a KubeVirt machine is: eth0 reaches what the underlay lets through, beside the mesh."
        );
        let mut open = BTreeSet::new();
        for from in &askers {
            let found = self.lab.scan(from, all.keys().copied()).await?;
            let outcome = if found.is_superset(&granted) {
                Ok(format!("{} of {} sockets", found.len(), all.len()))
            } else {
                Err(format!("{found:?}, granted {granted:?}"))
            };
            self.check(&format!("{from}, without any NetworkPolicy"), outcome);
            open.extend(found);
        }
        println!("  Granted by the mesh: {granted:?}. Open on the underlay alone:");
        print_by_address(open.difference(&granted), &all);

        self.title("kubectl apply -f deploy/cozystack/sandbox-networkpolicy.yaml, with its values set");
        println!("{}", without_comments(&boundary.policy()?));
        let applied = Instant::now();
        for from in &askers {
            boundary.close(from, &open, &granted).await?;
        }
        println!(
            "  in force {:.1} s after kubectl apply: own API server and resolver stay, and WireGuard",
            applied.elapsed().as_secs_f64()
        );
        let want: BTreeSet<SocketAddr> = granted.union(&admitted).copied().collect();
        for from in &askers {
            let found = boundary.found(from, &all, &want).await?;
            let outcome = if found == want {
                Ok(format!("{} of {} sockets: {found:?}", found.len(), all.len()))
            } else {
                Err(format!("{found:?}, granted and admitted {want:?}"))
            };
            self.check(&format!("{from}, with it"), outcome);
            let answer = self.lab.ask_until_answered(from, &format!("http://{service}")).await;
            self.check(&format!("{from} -> hub-web ({service})"), described(answer));
        }

        self.title("tenant-a is trusted: it reaches mgmt, and not what keeps mgmt running");
        let trusted = member
            .webs()
            .await?
            .into_iter()
            .next()
            .context("tenant-a runs no web server")?;
        let from = Asker::Pod(trusted);
        let url = format!("http://{}:8080", hub_webs[0].ip);
        let answer = self.lab.ask_until_answered(&from, &url).await;
        self.check(&format!("{from} -> pod {}", hub_webs[0].name), described(answer));
        let sockets: BTreeSet<SocketAddr> = hub.sockets().await?.into_keys().collect();
        let open = self.lab.scan(&from, sockets.iter().copied()).await?;
        // Where a kubeconfig leads to is the underlay's business: no mesh carries it.
        let apis = [&hub, &sandbox].map(|cluster| IpAddr::V4(cluster.plan().api_address()));
        let wrong: Vec<_> = open
            .iter()
            .filter(|socket| INFRASTRUCTURE.contains(&socket.port()) && !apis.contains(&socket.ip()))
            .collect();
        let outcome = match wrong[..] {
            [] => Ok(format!(
                "{} of {} sockets, none of them: {open:?}",
                open.len(),
                sockets.len()
            )),
            _ => Err(format!("{wrong:?}")),
        };
        self.check(
            "API server, kubelet, etcd, agent and their like, at every address",
            outcome,
        );

        self.title("the grant is taken back");
        let Some(from) = askers.first() else { return Ok(()) };
        hub.apply(&product.mesh_with(&[SANDBOX], &[])).await?;
        let applied = Instant::now();
        let closed = self.lab.until_closed(from, &granted).await;
        let closed = closed.map(|()| format!("no answer {:.1} s after kubectl apply", applied.elapsed().as_secs_f64()));
        self.check("hub-web", closed.map_err(|error| error.to_string()));

        self.title("as a user sees it");
        for (cluster, kinds) in [
            (&hub, "clustermesh,peers,peerpolicies"),
            (&sandbox, "peers,peerpolicies,services"),
        ] {
            println!("$ kubectl --context {} get {kinds} -A", cluster.plan().name);
            println!("{}", cluster.kubectl(["get", kinds, "-A"]).await?.stdout);
        }
        Ok(())
    }
}

/// A line for each address, with what it is and its open ports.
fn print_by_address<'a>(open: impl Iterator<Item = &'a SocketAddr>, all: &BTreeMap<SocketAddr, String>) {
    let mut lines: BTreeMap<IpAddr, (&str, Vec<String>)> = BTreeMap::new();
    for socket in open {
        let what = all.get(socket).map_or("", String::as_str);
        let (_, ports) = lines.entry(socket.ip()).or_insert((what, Vec::new()));
        ports.push(socket.port().to_string());
    }
    for (ip, (what, ports)) in lines {
        println!("    {ip:<15} {what}: {}", ports.join(" "));
    }
}

fn without_comments(yaml: &str) -> String {
    let lines = yaml.lines().filter(|line| !line.trim_start().starts_with('#'));
    lines.map(|line| format!("{line}\n")).collect()
}

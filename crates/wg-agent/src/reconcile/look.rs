//! The look at the peers between passes: who answers, who has to be tried elsewhere, and what metrics, the Node and
//! `/debug/state` are told. Nothing but endpoints is changed here.

use std::{collections::BTreeMap, time::Instant};

use clustermesh_agent_core::health::State;
use clustermesh_api::annotations::Agent;
use clustermesh_core::key::PublicKey;
use serde_json::json;

use super::{Current, Reconciler};
use crate::{
    firewall::Backend,
    identity::key,
    metrics::Traffic,
    publish::identity::{Facts, wanted},
    route::Routing,
};

impl<R: Routing, F: Backend> Reconciler<R, F> {
    /// Looks at the peers: tries elsewhere who does not answer, and tells metrics and the Node.
    pub(crate) fn look(&mut self) {
        let now = Instant::now();
        let Some(current) = self.current.take() else { return };
        let observed = match self.device.as_ref().map(|(device, ..)| device.observe()) {
            Some(Ok(observed)) => observed,
            Some(Err(error)) => {
                tracing::debug!(%error, "cannot look at the device");
                self.current = Some(current);
                return;
            }
            None => {
                self.current = Some(current);
                return;
            }
        };
        if self.tracks.look(&observed.peers, now)
            && let Err(trouble) = self.apply_peers(&current.compiled)
        {
            tracing::debug!(error = trouble.message, "cannot try another endpoint");
        }
        self.parts.kept.send_if_modified(|kept| {
            let changed = kept.live != *self.tracks.live();
            if changed {
                kept.live.clone_from(self.tracks.live());
            }
            changed
        });
        if self.rotation.is_some() || key::next(&self.parts.config.key_file).exists() {
            // Whether a key is to be changed is for a pass to see.
            self.parts.store.ring();
        }
        let cluster = |key: &PublicKey| current.clusters.get(key).cloned().unwrap_or_default();
        let traffic: Vec<Traffic> = observed
            .peers
            .iter()
            .map(|(key, peer)| Traffic {
                key: key.to_string(),
                cluster: cluster(key),
                state: self.tracks.state(key, now),
                rx: peer.stats.rx_bytes,
                tx: peer.stats.tx_bytes,
            })
            .collect();
        self.parts.metrics.traffic(&traffic, &observed.drops);
        let count = |state| u32::try_from(traffic.iter().filter(|t| t.state == state).count()).unwrap_or(u32::MAX);
        let agent = Agent {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: self
                .device
                .as_ref()
                .map(|(device, ..)| device.backend())
                .unwrap_or_default()
                .to_owned(),
            mode: "full".to_owned(),
            mtu: current.sizes.device.into(),
            policy_revision: current.policy_revision.clone(),
            peers_up: count(State::Up),
            peers_down: count(State::Down),
        };
        self.dump(&current, &traffic, &observed.peers, &agent);
        if !current.seen {
            // What stands on the Node is not known, and there is nobody to tell.
            self.current = Some(current);
            return;
        }
        let told = wanted(Facts {
            public_key: self.public_key(),
            wireguard_ip: self.parts.config.range.with_prefix(current.wireguard_ip),
            port: self.parts.config.port,
            node: &current.node,
            underlay: &current.underlay.addresses,
            agent,
        });
        self.parts.publish.send_if_modified(|wanted| {
            let changed = *wanted != told;
            *wanted = told;
            changed
        });
        self.current = Some(current);
    }

    fn dump(
        &self,
        current: &Current,
        traffic: &[Traffic],
        observed: &clustermesh_agent_core::device::ObservedPeers,
        agent: &Agent,
    ) {
        let Current {
            compiled,
            underlay,
            wireguard_ip,
            ..
        } = current;
        let states: BTreeMap<&str, &Traffic> = traffic.iter().map(|t| (t.key.as_str(), t)).collect();
        let peers: BTreeMap<&str, _> = compiled
            .peers
            .iter()
            .map(|(key, spec)| {
                let name = compiled.names.get(key).map_or("", String::as_str);
                let stats = observed.get(key).map(|peer| &peer.stats);
                let text = key.to_string();
                let traffic = states.get(text.as_str());
                let peer = json!({
                    "key": text,
                    "cluster": traffic.map(|t| &t.cluster),
                    "state": traffic.map(|t| t.state.as_str()),
                    "allowedIPs": spec.allowed_ips,
                    "candidates": compiled.endpoints.get(key),
                    "configuredEndpoint": self.tracks.current(key),
                    "liveEndpoint": stats.and_then(|s| s.endpoint),
                    "largestPacket": current.sizes.narrow.get(key).unwrap_or(&current.sizes.device),
                    "handshakeAgeSeconds": stats.and_then(|s| s.handshake_age).map(|age| age.as_secs()),
                    "rxBytes": traffic.map(|t| t.rx),
                    "txBytes": traffic.map(|t| t.tx),
                });
                (name, peer)
            })
            .collect();
        let dump = &self.parts.dump;
        dump.set("agent", json!(agent));
        dump.set("node", json!({
            "name": self.parts.config.node_name,
            "publicKey": self.parts.key.public().to_string(),
            "wireguardIP": wireguard_ip,
            "underlay": {"interface": underlay.interface.as_str(), "mtu": underlay.mtu, "addresses": underlay.addresses.keys().collect::<Vec<_>>(), "nextHops": underlay.next_hops},
        }));
        dump.set("peers", json!(peers));
        dump.set(
            "routes",
            json!(
                compiled
                    .routes
                    .routes
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
            ),
        );
        dump.set(
            "firewall",
            json!(
                clustermesh_agent_core::firewall::render(&compiled.firewall)
                    .lines()
                    .collect::<Vec<_>>()
            ),
        );
    }
}

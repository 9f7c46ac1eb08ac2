//! Saves each peer's live endpoint in a file next to the key, so that a restarted container can initiate a handshake with
//! every peer. No object contains the endpoints of a sandbox's nodes. If the gateway waited until these nodes initiate, they
//! would send into the lost session for up to 15 s.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Write},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use clustermesh_agent_core::device::{ObservedPeer, ObservedPeers, PeerChange};
use clustermesh_core::key::PublicKey;

/// The file and its content.
#[derive(Debug)]
pub(super) struct SavedEndpoints {
    file: PathBuf,
    endpoints: BTreeMap<PublicKey, SocketAddr>,
}

impl SavedEndpoints {
    /// Reads the file next to the key. A line that cannot be parsed is ignored; its peer then initiates the handshake.
    pub(super) fn load(key_file: &Path) -> Self {
        let file = key_file.with_file_name("endpoints");
        let text = fs::read_to_string(&file).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(String::new()),
            _ => Err(error),
        });
        let text = text.unwrap_or_else(|error| {
            tracing::warn!(file = %file.display(), %error, "cannot read the saved endpoints of peers");
            String::new()
        });
        let parse_line = |line: &str| {
            let (key, endpoint) = line.split_once(' ')?;
            Some((key.parse().ok()?, endpoint.parse().ok()?))
        };
        let endpoints = text.lines().filter_map(parse_line).collect();
        Self { file, endpoints }
    }

    /// Sets the saved endpoint for each added peer that has no endpoint.
    pub(super) fn set_endpoints(&self, changes: &mut [PeerChange]) {
        for change in changes {
            if let PeerChange::Add(key, spec) = change {
                spec.endpoint = spec.endpoint.or_else(|| self.endpoints.get(key).copied());
            }
        }
    }

    /// Saves the endpoints if they changed. Call it only while the device has all desired peers, because a peer that is not in
    /// `observed`, or has no endpoint, is removed from the file.
    pub(super) fn save(&mut self, observed: &ObservedPeers) {
        let key_and_endpoint = |(key, peer): (&PublicKey, &ObservedPeer)| Some((*key, peer.stats.endpoint?));
        let endpoints: BTreeMap<PublicKey, SocketAddr> = observed.iter().filter_map(key_and_endpoint).collect();
        if endpoints == self.endpoints {
            return;
        }
        self.endpoints = endpoints;
        if let Err(error) = self.write() {
            tracing::warn!(file = %self.file.display(), %error, "cannot save the endpoints of peers");
        }
    }

    fn write(&self) -> io::Result<()> {
        let new = self.file.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        for (key, endpoint) in &self.endpoints {
            writeln!(file, "{key} {endpoint}")?;
        }
        fs::rename(&new, &self.file)
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_agent_core::device::{PeerSpec, PeerStats};

    use super::*;

    #[test]
    fn saved_endpoint_is_used_again_and_invalid_lines_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let key_file = directory.path().join("key");
        let [known, unknown] = [1, 2].map(|n| PublicKey::new([n; 32]));
        let peer = |endpoint: Option<&str>| ObservedPeer {
            configured: PeerSpec::default(),
            stats: PeerStats {
                endpoint: endpoint.map(|text| text.parse().unwrap()),
                ..PeerStats::default()
            },
        };
        let observed = [(known, peer(Some("[2001:db8::7]:4000"))), (unknown, peer(None))].into();
        SavedEndpoints::load(&key_file).save(&observed);

        let endpoints = || {
            let mut changes = [known, unknown].map(|key| PeerChange::Add(key, PeerSpec::default()));
            SavedEndpoints::load(&key_file).set_endpoints(&mut changes);
            changes.map(|change| match change {
                PeerChange::Add(_, spec) => spec.endpoint,
                _ => None,
            })
        };
        assert_eq!(endpoints(), [Some("[2001:db8::7]:4000".parse().unwrap()), None]);
        let file = directory.path().join("endpoints");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("nonsense\n{unknown} nowhere\n{text}")).unwrap();
        assert_eq!(endpoints(), [Some("[2001:db8::7]:4000".parse().unwrap()), None]);
        fs::write(&file, [0xff]).unwrap();
        assert_eq!(endpoints(), [None, None]);
    }
}

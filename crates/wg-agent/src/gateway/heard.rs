//! Where each peer was heard from last, in a file beside the key. A container that starts again begins its handshakes there: a
//! sandbox's node goes on for 15 s in a session that nobody has any more, and a gateway is told no endpoints.

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

/// The file, and what it says.
#[derive(Debug)]
pub(super) struct Heard {
    file: PathBuf,
    endpoints: BTreeMap<PublicKey, SocketAddr>,
}

impl Heard {
    /// Reads it. A line that is none costs that peer the wait.
    pub(super) fn beside(key_file: &Path) -> Self {
        let file = key_file.with_file_name("endpoints");
        let text = fs::read_to_string(&file).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(String::new()),
            _ => Err(error),
        });
        let text = text.unwrap_or_else(|error| {
            tracing::warn!(file = %file.display(), %error, "where peers were heard from is not known");
            String::new()
        });
        let line = |line: &str| {
            let (key, endpoint) = line.split_once(' ')?;
            Some((key.parse().ok()?, endpoint.parse().ok()?))
        };
        let endpoints = text.lines().filter_map(line).collect();
        Self { file, endpoints }
    }

    /// Whoever comes into the device is dialled where it was heard from.
    pub(super) fn dial(&self, changes: &mut [PeerChange]) {
        for change in changes {
            if let PeerChange::Add(key, spec) = change {
                spec.endpoint = spec.endpoint.or_else(|| self.endpoints.get(key).copied());
            }
        }
    }

    /// Writes what the device says, if it says something else. It holds every peer by now.
    pub(super) fn keep(&mut self, observed: &ObservedPeers) {
        let endpoint = |(key, peer): (&PublicKey, &ObservedPeer)| Some((*key, peer.stats.endpoint?));
        let endpoints: BTreeMap<PublicKey, SocketAddr> = observed.iter().filter_map(endpoint).collect();
        if endpoints == self.endpoints {
            return;
        }
        self.endpoints = endpoints;
        if let Err(error) = self.write() {
            tracing::warn!(file = %self.file.display(), %error, "where peers were heard from cannot be kept");
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
    fn peer_is_dialled_after_a_start_where_it_was_heard_from() {
        let directory = tempfile::tempdir().unwrap();
        let key_file = directory.path().join("key");
        let [known, silent] = [1, 2].map(|n| PublicKey::new([n; 32]));
        let peer = |endpoint: Option<&str>| ObservedPeer {
            configured: PeerSpec::default(),
            stats: PeerStats {
                endpoint: endpoint.map(|text| text.parse().unwrap()),
                ..PeerStats::default()
            },
        };
        let observed = [(known, peer(Some("[2001:db8::7]:4000"))), (silent, peer(None))].into();
        Heard::beside(&key_file).keep(&observed);

        let dialled = || {
            let mut changes = [known, silent].map(|key| PeerChange::Add(key, PeerSpec::default()));
            Heard::beside(&key_file).dial(&mut changes);
            changes.map(|change| match change {
                PeerChange::Add(_, spec) => spec.endpoint,
                _ => None,
            })
        };
        assert_eq!(dialled(), [Some("[2001:db8::7]:4000".parse().unwrap()), None]);
        let file = directory.path().join("endpoints");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("nonsense\n{silent} nowhere\n{text}")).unwrap();
        assert_eq!(dialled(), [Some("[2001:db8::7]:4000".parse().unwrap()), None]);
        fs::write(&file, [0xff]).unwrap();
        assert_eq!(dialled(), [None, None]);
    }
}

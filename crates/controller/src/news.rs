//! For how long each sandbox has had news coming: what was granted to it and is not announced there yet. What has to wait is
//! `clustermesh_core::announce`'s; this is the clock.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use clustermesh_core::{
    announce::{self, News},
    diff::Step,
    mesh::ClusterIdentity,
    observe::Member,
};

/// When each piece of news was first there.
#[derive(Debug, Default)]
pub(crate) struct Coming(BTreeMap<ClusterIdentity, BTreeMap<News, Instant>>);

impl Coming {
    /// Forgets the members that are not these.
    pub(crate) fn keep(&mut self, there: impl Fn(&ClusterIdentity) -> bool) {
        self.0.retain(|identity, _| there(identity));
    }

    /// What of the steps of a sandbox is to be written now; until when the rest waits.
    pub(crate) fn due(
        &mut self,
        identity: &ClusterIdentity,
        member: &Member,
        steps: Vec<Step>,
        now: Instant,
    ) -> (Vec<Step>, Option<Instant>) {
        let since = self.0.remove(identity).unwrap_or_default();
        let waited = |news: &News| {
            since
                .get(news)
                .map_or(Duration::ZERO, |since| now.saturating_duration_since(*since))
        };
        let (due, news) = announce::due(steps, member, waited);
        // Forgotten when it is announced, or granted no more.
        let since: BTreeMap<_, _> = news
            .into_iter()
            .map(|news| {
                let since = since.get(&news).copied().unwrap_or(now);
                (news, since)
            })
            .collect();
        let until = since.iter().map(|(news, since)| *since + news.patience());
        let until = until.filter(|until| *until > now).min();
        if !since.is_empty() {
            self.0.insert(identity.clone(), since);
        }
        (due, until)
    }
}

#[cfg(test)]
mod tests {
    use clustermesh_core::{
        diff::{Action, Item},
        key::PublicKey,
        mesh::MeshId,
        observe::{Owner, PeerSpec},
    };

    use super::*;

    fn peer() -> Vec<Step> {
        let spec = PeerSpec {
            public_key: PublicKey::new([1; 32]),
            allowed_ips: [].into(),
            endpoint: None,
            candidates: vec![],
            persistent_keepalive: 0,
            requires_policy: None,
        };
        vec![Step {
            mesh: MeshId {
                namespace: "ns".into(),
                name: "m".into(),
            },
            action: Action::Create,
            item: Item::Peer("p".into(), Some(spec)),
            owner: Owner::default(),
            fields: vec![],
        }]
    }

    #[test]
    fn news_waits_from_when_it_was_first_there_and_is_forgotten_when_it_is_none_any_more() {
        let (mut coming, start, member) = (Coming::default(), Instant::now(), Member::default());
        let patience = News::Nodes(Owner::default()).patience();
        let mut due = |steps, at| coming.due(&ClusterIdentity::Local, &member, steps, at);
        assert_eq!(due(peer(), start), (vec![], Some(start + patience)));
        let half = start + patience / 2;
        assert_eq!(due(peer(), half), (vec![], Some(start + patience)));
        // As long as it is not seen there it is written, and does not begin to wait anew.
        assert_eq!(due(peer(), start + patience), (peer(), None));
        assert_eq!(due(peer(), start + 2 * patience), (peer(), None));
        assert_eq!(due(vec![], start + 2 * patience), (vec![], None));
        let again = start + 3 * patience;
        assert_eq!(due(peer(), again), (vec![], Some(again + patience)));
    }
}

//! Records when a Peer or PeerPolicy need not exist, or must not be written, and judges the controller's writes by that.

use std::{collections::BTreeSet, fmt};

use clustermesh_lab::AuditedWrite;

/// A delete that a [`Doubt`] permits may arrive up to this long after the doubt ended: the delete waits in the controller, or in
/// an API server or proxy that delays it for up to 30 s. If the mesh is paused in the meantime, the time begins anew when the
/// pause ends, because only then may the controller delete.
pub(crate) const GRACE_SECONDS: i64 = 60;
/// How long after the begin of a pause a write may still be in flight.
const PAUSE_SECONDS: i64 = 60;

/// What a doubt is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The Node of this name is absent, or has another key.
    Node(String),
    /// The entry of this member is absent.
    Entry(String),
    /// The mesh is paused. Then nothing may be written at all.
    Pause,
}

/// A time during which the plan may lack an object or, with [`Scope::Pause`], nothing may be written.
#[derive(Debug)]
struct Doubt {
    scope: Scope,
    from: i64,
    /// `None` = it lasts.
    to: Option<i64>,
}

/// All doubts, and the name of the mesh.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    doubts: Vec<Doubt>,
    mesh: String,
}

/// A write that no plan asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) member: String,
    pub(crate) write: String,
    pub(crate) why: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.member, self.why, self.write)
    }
}

/// The number of writes, and of deletes, that were judged.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Judged {
    pub(crate) writes: usize,
    pub(crate) deletes: usize,
}

impl Ledger {
    pub(crate) fn new(mesh: &str) -> Self {
        Self {
            doubts: Vec::new(),
            mesh: mesh.to_owned(),
        }
    }

    /// Begins a doubt at this time, in microseconds. Does nothing if a doubt about this scope has begun and not ended.
    pub(crate) fn begin(&mut self, scope: Scope, now: i64) {
        let lasts = |doubt: &Doubt| doubt.scope == scope && doubt.to.is_none();
        if !self.doubts.iter().any(lasts) {
            self.doubts.push(Doubt {
                scope,
                from: now,
                to: None,
            });
        }
    }

    /// Ends the doubt about this scope.
    pub(crate) fn end(&mut self, scope: &Scope, now: i64) {
        let of_scope = |doubt: &&mut Doubt| doubt.scope == *scope && doubt.to.is_none();
        for doubt in self.doubts.iter_mut().filter(of_scope) {
            doubt.to = Some(now);
        }
    }

    /// Whether a delete at this time may follow from a doubt about this scope.
    fn is_doubted(&self, scope: &Scope, at: i64) -> bool {
        self.doubts.iter().any(|doubt| {
            let until = doubt.to.map(|to| self.end_of_grace(to));
            doubt.scope == *scope && doubt.from <= at && until.is_none_or(|until| at <= until)
        })
    }

    /// A doubt ended at `to`. Returns until when a delete that it permits may arrive.
    fn end_of_grace(&self, to: i64) -> i64 {
        let grace = GRACE_SECONDS * 1_000_000;
        let mut until = to + grace;
        // The earlier pauses come first, so each one sees the end that those before it allow.
        for pause in self.doubts.iter().filter(|doubt| doubt.scope == Scope::Pause) {
            // A pause that lasts has no end yet. Whether a delete came during it is for `is_paused` to judge.
            let end = pause.to.unwrap_or(i64::MAX - grace);
            if pause.from <= until && to <= end {
                until = until.max(end + grace);
            }
        }
        until
    }

    fn is_paused(&self, at: i64) -> bool {
        self.doubts.iter().any(|doubt| {
            let from = doubt.from + PAUSE_SECONDS * 1_000_000;
            doubt.scope == Scope::Pause && from <= at && doubt.to.is_none_or(|to| at <= to)
        })
    }

    /// Judges the controller's successful writes of Peers and PeerPolicies into a member; ignores all others.
    pub(crate) fn judge(&self, member: &str, writes: &[AuditedWrite]) -> (Judged, Vec<Violation>) {
        let (mut judged, mut violations) = (Judged::default(), Vec::new());
        for write in writes {
            // A request is `VERB RESOURCE/SUBRESOURCE NAMESPACE/NAME STATUS`. Peers and PeerPolicies have no namespace, and are
            // written without a subresource: `delete peers/ /NAME 200`.
            let mut words = write.request.split(' ');
            let [verb, resource, object, status] = [(); 4].map(|()| words.next().unwrap_or_default());
            if !["peers/", "peerpolicies/"].contains(&resource) || !status.starts_with('2') {
                continue;
            }
            judged.writes += 1;
            let at = microseconds(&write.received);
            let mut violation = |why| {
                violations.push(Violation {
                    member: member.to_owned(),
                    write: format!("{} {}", write.received, write.request),
                    why,
                });
            };
            if self.is_paused(at) {
                violation("written while the mesh was paused");
            }
            if verb != "delete" {
                continue;
            }
            judged.deletes += 1;
            let name = object.trim_start_matches('/');
            let scopes = self.scopes(member, name);
            if !scopes.iter().any(|scope| self.is_doubted(scope, at)) {
                violation("deleted although the plan contains it");
            }
        }
        (judged, violations)
    }

    /// The doubts that permit the delete of an object in a member, from the object's name: `MESH--CLUSTER` or `MESH--CLUSTER--NODE`, and
    /// if that name was taken, `-` and 8 hex digits.
    fn scopes(&self, member: &str, name: &str) -> Vec<Scope> {
        let mut scopes = vec![Scope::Entry(member.to_owned())];
        let Some(rest) = name.strip_prefix(&format!("{}--", self.mesh)) else {
            return scopes;
        };
        let without_suffix = |text: &str| text.rsplit_once('-').map(|(text, _)| text.to_owned());
        let (source, node) = rest.split_once("--").map_or((rest, None), |(a, b)| (a, Some(b)));
        let names =
            |text: &str| BTreeSet::from_iter([Some(text.to_owned()), without_suffix(text)].into_iter().flatten());
        match node {
            Some(node) => {
                scopes.push(Scope::Entry(source.to_owned()));
                scopes.extend(names(node).into_iter().map(Scope::Node));
            }
            None => scopes.extend(names(source).into_iter().map(Scope::Entry)),
        }
        scopes
    }
}

/// The time of an audit log's line, in microseconds since 1970.
pub(crate) fn microseconds(text: &str) -> i64 {
    let time: Result<k8s_openapi::jiff::Timestamp, _> = text.parse();
    time.map(|time| time.as_microsecond()).unwrap_or_default()
}

/// The current time, in microseconds since 1970.
pub(crate) fn now() -> i64 {
    k8s_openapi::jiff::Timestamp::now().as_microsecond()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(verb: &str, object: &str, minute: u32) -> AuditedWrite {
        AuditedWrite {
            request: format!("{verb} {object} 200"),
            received: format!("2026-01-01T00:{minute:02}:00.000000Z"),
            answered: String::new(),
            user_agent: String::new(),
        }
    }

    fn at(minute: u32) -> i64 {
        microseconds(&format!("2026-01-01T00:{minute:02}:00.000000Z"))
    }

    fn reasons(ledger: &Ledger, writes: &[AuditedWrite]) -> Vec<&'static str> {
        let (_, violations) = ledger.judge("tenant-b", writes);
        violations.into_iter().map(|violation| violation.why).collect()
    }

    const PEER: &str = "peers/ /prod--tenant-a--tenant-a-1";
    const DELETED: &str = "deleted although the plan contains it";

    #[test]
    fn delete_of_a_peer_whose_node_exists_is_a_violation() {
        let mut ledger = Ledger::new("prod");
        assert_eq!(reasons(&ledger, &[write("delete", PEER, 5)]), [DELETED]);
        ledger.begin(Scope::Node("tenant-a-1".to_owned()), at(10));
        ledger.end(&Scope::Node("tenant-a-1".to_owned()), at(12));
        let writes = [9, 10, 12, 13, 14].map(|minute| write("delete", PEER, minute));
        assert_eq!(reasons(&ledger, &writes), [DELETED; 2]);
        let suffixed = "peers/ /prod--tenant-a--tenant-a-1-0123abcd";
        assert_eq!(reasons(&ledger, &[write("delete", suffixed, 11)]), [""; 0]);
        let other = "peers/ /prod--tenant-a--tenant-a-2";
        assert_eq!(reasons(&ledger, &[write("delete", other, 11)]), [DELETED]);
    }

    #[test]
    fn delete_that_waits_for_the_end_of_a_pause_is_planned() {
        let mut ledger = Ledger::new("prod");
        let node = Scope::Node("tenant-a-1".to_owned());
        ledger.begin(Scope::Pause, at(1));
        ledger.end(&Scope::Pause, at(3));
        ledger.begin(node.clone(), at(10));
        ledger.end(&node, at(12));
        for [from, to] in [[12, 15], [16, 18], [20, 25]] {
            ledger.begin(Scope::Pause, at(from));
            ledger.end(&Scope::Pause, at(to));
        }
        let deletes = |minutes: &[u32]| {
            let writes: Vec<_> = minutes.iter().map(|minute| write("delete", PEER, *minute)).collect();
            reasons(&ledger, &writes)
        };
        assert_eq!(deletes(&[12, 16, 19]), [""; 0]);
        // The third pause began when the time after the second was over.
        assert_eq!(deletes(&[4, 26]), [DELETED; 2]);
    }

    #[test]
    fn delete_while_an_entry_is_absent_is_planned() {
        for entry in ["tenant-a", "tenant-b"] {
            let mut ledger = Ledger::new("prod");
            ledger.begin(Scope::Entry(entry.to_owned()), at(10));
            let policy = "peerpolicies/ /prod--tenant-a";
            let writes = [write("delete", PEER, 11), write("delete", policy, 11)];
            assert_eq!(reasons(&ledger, &writes), [""; 0], "{entry}");
        }
        let mut ledger = Ledger::new("prod");
        ledger.begin(Scope::Entry("tenant-c".to_owned()), at(10));
        assert_eq!(reasons(&ledger, &[write("delete", PEER, 11)]), [DELETED]);
    }

    #[test]
    fn write_during_a_pause_is_a_violation() {
        let mut ledger = Ledger::new("prod");
        ledger.begin(Scope::Pause, at(10));
        ledger.end(&Scope::Pause, at(20));
        let writes = [9, 10, 12, 21].map(|minute| write("update", PEER, minute));
        assert_eq!(reasons(&ledger, &writes), ["written while the mesh was paused"]);
    }
}

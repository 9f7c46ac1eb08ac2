//! The agent's reports about itself: troubles for the log and `/readyz`, the state dump for `/debug/state`, and
//! `wg-agent status`, which queries a running agent for the dump.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use clustermesh_daemon::{Readiness, ReadinessItem};
use serde_json::{Value, json};

use crate::metrics::Metrics;

pub(crate) mod command;
pub(crate) mod socket;
pub(crate) mod table;
pub(crate) mod view;

/// A problem that the agent found. The agent tries again until the problem is gone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Trouble {
    /// The part of the agent, such as `firewall`.
    pub(crate) part: &'static str,
    /// What is wrong and what to do.
    pub(crate) message: String,
    /// Whether the agent is ready nevertheless. `/readyz` then shows the problem as a remark.
    pub(crate) harmless: bool,
}

impl Trouble {
    pub(crate) fn new(part: &'static str, message: impl ToString) -> Self {
        Self {
            part,
            message: message.to_string(),
            harmless: false,
        }
    }

    fn view(&self) -> view::TroubleView {
        view::TroubleView {
            part: self.part.to_owned(),
            message: self.message.clone(),
            harmless: self.harmless,
        }
    }

    pub(crate) fn harmless(part: &'static str, message: impl ToString) -> Self {
        Self {
            harmless: true,
            ..Self::new(part, message)
        }
    }
}

/// The current troubles.
#[derive(Debug)]
struct Troubles {
    current: BTreeMap<Trouble, ReadinessItem>,
    readiness: Readiness,
    metrics: Metrics,
    /// Keeps a line in `/readyz` until a pass has only harmless troubles.
    first_pass: Option<ReadinessItem>,
}

impl Troubles {
    fn new(readiness: Readiness, metrics: Metrics) -> Self {
        let first_pass = Some(readiness.pending("first pass over the node"));
        Self {
            current: BTreeMap::new(),
            readiness,
            metrics,
            first_pass,
        }
    }

    /// Sets the troubles of a pass. Each is logged when it appears, and as resolved when its part has no trouble left.
    fn set(&mut self, troubles: Vec<Trouble>) {
        let troubles: BTreeSet<Trouble> = troubles.into_iter().collect();
        let part_has_trouble = |trouble: &Trouble| troubles.iter().any(|other| other.part == trouble.part);
        for (trouble, _) in self.current.extract_if(.., |trouble, _| !troubles.contains(trouble)) {
            if !part_has_trouble(&trouble) {
                tracing::info!(part = trouble.part, was = trouble.message, "resolved");
            }
        }
        for trouble in troubles {
            if !trouble.harmless {
                self.metrics.count_error(trouble.part);
            }
            let (readiness, part) = (&self.readiness, trouble.part);
            self.current.entry(trouble).or_insert_with_key(|trouble| {
                tracing::warn!(part, "{}", trouble.message);
                let line = format!("{part}: {}", trouble.message);
                if trouble.harmless {
                    readiness.remark(line)
                } else {
                    readiness.pending(line)
                }
            });
        }
        if self.current.keys().all(|trouble| trouble.harmless) {
            self.first_pass = None;
        }
    }
}

/// Lines about objects that are left out; each is logged when it appears and when it is gone.
#[derive(Debug, Default)]
struct LeftOut(BTreeSet<String>);

impl LeftOut {
    fn set(&mut self, lines: BTreeSet<String>) {
        for line in lines.difference(&self.0) {
            tracing::warn!("left out: {line}");
        }
        for line in self.0.difference(&lines) {
            tracing::info!("no longer left out: {line}");
        }
        self.0 = lines;
    }
}

/// Reports the results of passes: metrics, troubles, objects that are left out, and the state dump.
pub(crate) struct PassReporter {
    pub(crate) metrics: Metrics,
    pub(crate) dump: Dump,
    troubles: Troubles,
    left_out: LeftOut,
}

impl PassReporter {
    pub(crate) fn new(readiness: Readiness, metrics: Metrics, dump: Dump) -> Self {
        Self {
            troubles: Troubles::new(readiness, metrics.clone()),
            left_out: LeftOut::default(),
            metrics,
            dump,
        }
    }

    /// Reports the troubles of a pass. Returns whether all are harmless.
    pub(crate) fn set_troubles(&mut self, troubles: Vec<Trouble>) -> bool {
        let are_all_harmless = troubles.iter().all(|trouble| trouble.harmless);
        let views: Vec<_> = troubles.iter().map(Trouble::view).collect();
        self.dump.set("troubles", json!(views));
        self.troubles.set(troubles);
        are_all_harmless
    }

    /// Reports objects that are left out, because they are refused or unreadable. In the metric and in the dump, unreadable objects
    /// count as refused. Each object has a reason, for the metric, and a line, for the log and the dump.
    pub(crate) fn set_left_out(&mut self, left_out: impl IntoIterator<Item = (String, String)>) {
        let mut reasons: BTreeMap<String, i64> = BTreeMap::new();
        let mut lines = BTreeSet::new();
        for (reason, line) in left_out {
            *reasons.entry(reason).or_default() += 1;
            lines.insert(line);
        }
        self.metrics.set_refused(&reasons);
        self.dump.set("refused", json!(lines));
        self.left_out.set(lines);
    }
}

/// Renders a section of the dump on request.
type Section = Arc<dyn Fn() -> Value + Send + Sync>;

/// The state dump. Cheap to clone; all clones share it.
#[derive(Clone, Default)]
pub(crate) struct Dump(Arc<Mutex<BTreeMap<&'static str, Section>>>);

impl std::fmt::Debug for Dump {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sections = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_set().entries(sections.keys()).finish()
    }
}

impl Dump {
    /// Sets a small section.
    pub(crate) fn set(&self, section: &'static str, value: Value) {
        self.set_lazy(section, move || value.clone());
    }

    /// Sets a large section, which is rendered only on request: rendering 5,000 peers every five seconds would be wasted work.
    pub(crate) fn set_lazy(&self, section: &'static str, render: impl Fn() -> Value + Send + Sync + 'static) {
        let mut sections = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sections.insert(section, Arc::new(render));
    }

    pub(crate) fn render(&self) -> Value {
        // The sections are rendered without the lock, so that setting a section never waits for a request.
        let sections = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        sections.into_iter().map(|(name, render)| (name, render())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_is_ready_when_all_troubles_are_harmless() {
        let readiness = Readiness::new();
        let mut troubles = Troubles::new(readiness.clone(), Metrics::default());
        troubles.set(vec![
            Trouble::new("firewall", "no nft"),
            Trouble::harmless("source", "no CRD"),
        ]);
        assert_eq!(
            readiness.pending_items(),
            ["firewall: no nft", "first pass over the node"]
        );
        troubles.set(vec![Trouble::harmless("source", "no CRD")]);
        assert_eq!(readiness.pending_items(), Vec::<String>::new());
        troubles.set(vec![Trouble::new("routes", "x")]);
        assert_eq!(readiness.pending_items(), ["routes: x"]);
        troubles.set(vec![]);
        assert!(readiness.is_ready());
    }
}

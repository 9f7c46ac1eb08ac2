//! `clustermeshctl explain`: shows whether a connection is allowed, and why.
//!
//! It parses the two ends ([`end`]), finds their addresses in the input ([`locate`]), gets the explanation for each pair of
//! addresses ([`crate::explanation`]), and prints the answer ([`show`]).

use std::{
    io::{Read, Write},
    net::IpAddr,
};

use crate::{
    args::{ExplainArgs, Output},
    explanation::{Explanation, Rule, Source, Verdict},
    plan::{PlanResult, print},
    problem::Problem,
};

mod end;
mod locate;
mod show;

use end::ConnectionEnd;
use locate::{Located, Target};

/// Exit code if the answer is neither yes nor no.
pub(crate) const CANNOT_TELL: u8 = 2;

/// The answer for one address of the destination.
struct Row {
    target: Target,
    from: Source,
    explanation: Explanation,
}

/// The whole answer.
struct Answer {
    from: String,
    to: String,
    /// How the two ends were interpreted.
    notes: Vec<String>,
    /// One row for each address of the destination. Empty = the source or the destination was not found; the notes name it.
    rows: Vec<Row>,
}

impl Answer {
    /// The verdict for the destination: allowed if one of its addresses is.
    fn verdict(&self) -> Verdict {
        let verdicts = self.rows.iter().map(|row| row.explanation.verdict());
        verdicts.min().unwrap_or(Verdict::Unknown)
    }
}

/// Runs the command. Notes and warnings go to `stderr`.
///
/// # Errors
/// All errors in the input.
pub(crate) async fn run(
    args: &ExplainArgs,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    let ExplainArgs {
        from,
        to,
        given,
        output,
    } = args;
    let (source, port) = end::parse(from).map_err(|why| vec![Problem::usage(format!("SRC {from:?}: {why}"))])?;
    if port.is_some() {
        let why = format!("SRC {from:?}: leave the port out: the side that opens a connection has no fixed port");
        return Err(vec![Problem::usage(why)]);
    }
    let (target, port) = end::parse(to).map_err(|why| vec![Problem::usage(format!("DST {to:?}: {why}"))])?;
    let outcome = PlanResult::read(given, stdin, stderr).await?;
    let answer = answer(&outcome, (from, &source), (to, &target, port.as_ref()))?;
    print(stdout, &show::render(&answer, *output)?)?;
    Ok(match answer.verdict() {
        Verdict::Allowed => 0,
        Verdict::Denied => 1,
        Verdict::Unknown => CANNOT_TELL,
    })
}

fn answer(
    outcome: &PlanResult,
    (from, source): (&str, &ConnectionEnd),
    (to, target, port): (&str, &ConnectionEnd, Option<&end::Port>),
) -> Result<Answer, Vec<Problem>> {
    let mut answer = Answer {
        from: from.to_owned(),
        to: to.to_owned(),
        notes: Vec::new(),
        rows: Vec::new(),
    };
    let finder = locate::Finder { outcome };
    let located = finder.sources(source).and_then(|sources| {
        let targets = finder.targets(target, port, &sources)?;
        Ok((sources, targets))
    });
    let (sources, targets) = match located {
        Ok(located) => located,
        Err(locate::LocateError::Usage(why)) => return Err(vec![Problem::usage(why)]),
        Err(locate::LocateError::NotFound(why)) => {
            answer.notes.push(why);
            return Ok(answer);
        }
    };
    let Located { notes, targets } = targets;
    answer.notes.extend(notes);
    let explainer = outcome.explainer();
    for target in targets {
        let source = source_of_family(&sources, target.to.address);
        let explanation = explainer.explain(&source, &target.to);
        answer.rows.push(Row {
            target,
            from: source,
            explanation,
        });
    }
    resolve_cluster_ips(&mut answer.rows);
    Ok(answer)
}

/// Returns the source address of the same family as the destination.
fn source_of_family(sources: &[Source], to: IpAddr) -> Source {
    let fits = |source: &&Source| source.address.is_none_or(|address| address.is_ipv4() == to.is_ipv4());
    sources
        .iter()
        .find(fits)
        .or_else(|| sources.first())
        .cloned()
        .expect("an end that was found has a source")
}

/// Corrects the answers for ClusterIPs. kube-proxy translates a ClusterIP before the policy is checked, so it is allowed only if
/// one of its endpoints is.
///
/// For a sandbox, rows of ClusterIPs are removed: it uses gateways instead, so their answer is irrelevant.
fn resolve_cluster_ips(rows: &mut Vec<Row>) {
    let is_not_granted = |row: &Row| matches!(row.explanation.rule, Rule::NotGranted | Rule::NoGrant);
    rows.retain(|row| !(row.target.is_cluster_ip && is_not_granted(row)));
    let endpoints = || rows.iter().filter(|row| !row.target.is_cluster_ip);
    let has_allowed_endpoint = endpoints().any(|row| row.explanation.verdict() == Verdict::Allowed);
    let Some(first) = endpoints().next().map(|row| row.explanation.clone()) else {
        return;
    };
    for row in rows
        .iter_mut()
        .filter(|row| row.target.is_cluster_ip && !has_allowed_endpoint)
    {
        if row.explanation.verdict() == Verdict::Allowed {
            row.explanation.rule = first.rule;
            row.explanation.message = format!("none of its endpoints is allowed: {}", first.message);
        }
    }
}

/// Whether the output is text for people.
fn is_table(output: Output) -> bool {
    output == Output::Table
}

//! `clustermeshctl explain`: shows whether a connection is allowed, and why; or what the plan has for a node ([`node`]).
//!
//! It parses the two ends of the connection ([`connection_end`]), finds their addresses in the input ([`locate`]), explains the
//! connection to each address of the destination ([`crate::explanation`]), and prints the answer ([`show`]).

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

mod connection_end;
mod locate;
mod node;
mod show;

use connection_end::ConnectionEnd;
use locate::{DestinationAddress, LocatedDestination};

/// Exit code for [`Verdict::Unknown`] and for errors.
pub(crate) const CANNOT_TELL: u8 = 2;

/// The answer for one address of the destination.
struct Row {
    destination: DestinationAddress,
    from: Source,
    explanation: Explanation,
}

/// The answers for all addresses of the destination.
struct Answer {
    from: String,
    to: String,
    /// How the two ends were interpreted.
    notes: Vec<String>,
    /// One row for each address of the destination, except ClusterIPs that [`resolve_cluster_ips`] removes. Empty = the source or the
    /// destination was not found; the notes give the reason.
    rows: Vec<Row>,
}

impl Answer {
    /// The verdict for the destination: allowed if one of its addresses is allowed, else unknown if one is unknown, else denied.
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
        input,
        output,
    } = args;
    if from == node::WORD {
        return node::run(args, stdin, stdout, stderr).await;
    }
    let (source, port) =
        connection_end::parse(from).map_err(|why| vec![Problem::other(format!("SRC {from:?}: {why}"))])?;
    if port.is_some() {
        let why = format!("SRC {from:?}: leave the port out, because the client of a connection has no fixed port");
        return Err(vec![Problem::other(why)]);
    }
    let (destination, port) =
        connection_end::parse(to).map_err(|why| vec![Problem::other(format!("DST {to:?}: {why}"))])?;
    let outcome = PlanResult::read(input, stdin, stderr).await?;
    let answer = answer(&outcome, (from, &source), (to, &destination, port.as_ref()))?;
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
    (to, destination, port): (&str, &ConnectionEnd, Option<&connection_end::Port>),
) -> Result<Answer, Vec<Problem>> {
    let mut answer = Answer {
        from: from.to_owned(),
        to: to.to_owned(),
        notes: Vec::new(),
        rows: Vec::new(),
    };
    let finder = locate::Finder { outcome };
    let located = finder.find_sources(source).and_then(|sources| {
        let destinations = finder.find_destinations(destination, port, &sources)?;
        Ok((sources, destinations))
    });
    let (sources, destinations) = match located {
        Ok(located) => located,
        Err(locate::LocateError::Usage(why)) => return Err(vec![Problem::other(why)]),
        Err(locate::LocateError::Unresolved(why)) => {
            answer.notes.push(why);
            return Ok(answer);
        }
    };
    let LocatedDestination { notes, addresses } = destinations;
    answer.notes.extend(notes);
    let explainer = outcome.explainer();
    for destination in addresses {
        let source = source_of_family(&sources, destination.to.address);
        let explanation = explainer.explain(&source, &destination.to);
        answer.rows.push(Row {
            destination,
            from: source,
            explanation,
        });
    }
    resolve_cluster_ips(&mut answer.rows);
    Ok(answer)
}

/// Returns the first source whose address has the IP family of the destination, or that has no address. If no source fits, returns
/// the first element of `sources`.
fn source_of_family(sources: &[Source], to: IpAddr) -> Source {
    let is_same_family = |source: &&Source| source.address.is_none_or(|address| address.is_ipv4() == to.is_ipv4());
    sources
        .iter()
        .find(is_same_family)
        .or_else(|| sources.first())
        .cloned()
        .expect("find_sources returns at least one source")
}

/// Corrects the rows of ClusterIPs. kube-proxy translates a ClusterIP before the policy is checked, so a ClusterIP is allowed only if
/// one of its endpoints is allowed.
///
/// Removes a ClusterIP's row that says that the sandbox has no grant: a grant would not open the ClusterIP, but only gateway ports. The
/// rows of the endpoints stay and show why they are denied.
fn resolve_cluster_ips(rows: &mut Vec<Row>) {
    let lacks_grant = |row: &Row| {
        matches!(
            row.explanation.rule,
            Rule::DestinationNotGranted | Rule::NoGrantForMember
        )
    };
    rows.retain(|row| !(row.destination.is_cluster_ip && lacks_grant(row)));
    let endpoints = || rows.iter().filter(|row| !row.destination.is_cluster_ip);
    let has_allowed_endpoint = endpoints().any(|row| row.explanation.verdict() == Verdict::Allowed);
    let Some(first) = endpoints().next().map(|row| row.explanation.clone()) else {
        return;
    };
    for row in rows
        .iter_mut()
        .filter(|row| row.destination.is_cluster_ip && !has_allowed_endpoint)
    {
        if row.explanation.verdict() == Verdict::Allowed {
            row.explanation.rule = first.rule;
            row.explanation.message = format!("none of its endpoints is allowed: {}", first.message);
        }
    }
}

fn is_table(output: Output) -> bool {
    output == Output::Table
}

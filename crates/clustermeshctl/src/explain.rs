//! `clustermeshctl explain`: read what was given, find the two ends in it, put each pair of addresses to the planner. How ends
//! are written is in [`place`], what stands behind them in [`locate`], the forms of the answer in [`show`].

use std::{
    io::{Read, Write},
    net::IpAddr,
};

use clustermesh_core::plan::explain::{self, Explanation, Rule, Source, Verdict};

use crate::{
    args::{ExplainArgs, Output},
    plan::{Outcome, print},
    problem::Problem,
    world,
};

mod locate;
mod place;
mod show;

use locate::{Located, Target};
use place::Place;

/// Exit code where there is no yes or no.
pub(crate) const CANNOT_TELL: u8 = 2;

/// What is answered of one address of the destination.
struct Row {
    target: Target,
    from: Source,
    answer: Explanation,
}

/// The whole answer.
struct Answer {
    from: String,
    to: String,
    /// What a person should know of how the two ends were read.
    notes: Vec<String>,
    /// By address; empty = nothing could be asked, and the notes say why.
    rows: Vec<Row>,
}

impl Answer {
    /// What it comes to: what one address of it lets in is in.
    fn verdict(&self) -> Verdict {
        let verdicts = self.rows.iter().map(|row| row.answer.verdict());
        verdicts.min().unwrap_or(Verdict::Unknown)
    }
}

/// Runs the command. Notes and warnings go to `stderr`.
///
/// # Errors
/// Everything that has to be mended before there can be an answer.
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
    let (source, port) = place::read(from).map_err(|why| vec![Problem::usage(format!("SRC {from:?}: {why}"))])?;
    if port.is_some() {
        let why = format!("SRC {from:?}: the side that opens a connection has no port to name: leave it out");
        return Err(vec![Problem::usage(why)]);
    }
    let (target, port) = place::read(to).map_err(|why| vec![Problem::usage(format!("DST {to:?}: {why}"))])?;
    let outcome = Outcome::read(given, stdin, stderr).await?;
    let answer = answer(&outcome, (from, &source), (to, &target, port.as_ref()))?;
    print(stdout, &show::render(&answer, *output)?)?;
    Ok(match answer.verdict() {
        Verdict::Allowed => 0,
        Verdict::Denied => 1,
        Verdict::Unknown => CANNOT_TELL,
    })
}

fn answer(
    outcome: &Outcome,
    (from, source): (&str, &Place),
    (to, target, port): (&str, &Place, Option<&place::Port>),
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
        Err(locate::Missing::Usage(why)) => return Err(vec![Problem::usage(why)]),
        Err(locate::Missing::NotThere(why)) => {
            answer.notes.push(why);
            return Ok(answer);
        }
    };
    let Located { notes, targets } = targets;
    answer.notes.extend(notes);
    let naming = world::naming(&outcome.world.observations.hub);
    let world = explain::ExplainInputs {
        meshes: &outcome.meshes,
        seen: &outcome.world.observations,
        settings: &outcome.settings,
        naming: &naming,
        plan: &outcome.plan,
    };
    for target in targets {
        let source = of_family(&sources, target.to.address);
        let explanation = explain::explain(&world, &source, &target.to);
        answer.rows.push(Row {
            target,
            from: source,
            answer: explanation,
        });
    }
    translated(&mut answer.rows);
    Ok(answer)
}

/// Of a pod with an address of each family the one that fits.
fn of_family(sources: &[Source], to: IpAddr) -> Source {
    let fits = |source: &&Source| source.address.is_none_or(|address| address.is_ipv4() == to.is_ipv4());
    sources
        .iter()
        .find(fits)
        .or_else(|| sources.first())
        .cloned()
        .expect("a place that was found has a source")
}

/// A ClusterIP is translated before a policy looks: it lets in what one of its endpoints lets in. A sandbox never uses one, so
/// that it could not is no answer to whether it reaches the Service.
fn translated(rows: &mut Vec<Row>) {
    let barred = |row: &Row| matches!(row.answer.rule, Rule::NotGranted | Rule::NoGrant);
    rows.retain(|row| !(row.target.cluster_ip && barred(row)));
    let endpoints = || rows.iter().filter(|row| !row.target.cluster_ip);
    let open = endpoints().any(|row| row.answer.verdict() == Verdict::Allowed);
    let Some(first) = endpoints().next().map(|row| row.answer.clone()) else {
        return;
    };
    for row in rows.iter_mut().filter(|row| row.target.cluster_ip && !open) {
        if row.answer.verdict() == Verdict::Allowed {
            row.answer.rule = first.rule;
            row.answer.message = format!("its endpoints are what is let in or not: {}", first.message);
        }
    }
}

/// YAML and JSON are one shape; which, is the flag's.
fn is_table(output: Output) -> bool {
    output == Output::Table
}

//! Renders a graph as SVG. The line of a link shows the link's state by its colour and its dashes.

use std::fmt::Write;

use super::{
    layout::{BOX_HEIGHT, HEADER, Layout, is_with_hub},
    model::{Graph, Link, LinkState, Member},
    text::{describe_unreachable, summary},
};

/// The maximum number of links that are drawn in the states up, closed and unknown, not counting links to the hub. If there are
/// more, none of them is drawn, because they would hide the other links. It is still visible which members are quarantined or
/// unreachable: their boxes show it.
const MAX_OTHER_LINKS: usize = 60;

const STYLE: &str = "text{font:13px sans-serif;fill:#1a1a1a}.name{font-weight:bold}.small{font-size:11px}\
                     .box{fill:#f7f7f7;stroke:#8a8a8a}.bad{fill:#fdecea;stroke:#c62828}.closed{fill:#f3e8f7;stroke:#6a1b9a}\
                     path{fill:none}";

/// Colour, width and dashes of a line.
const fn line(state: LinkState) -> (&'static str, &'static str, &'static str) {
    match state {
        LinkState::Down => ("#c62828", "4", "2 4"),
        LinkState::Partly => ("#e08a00", "4", "12 4"),
        LinkState::Unknown => ("#757575", "2", "3 3"),
        LinkState::Closed => ("#6a1b9a", "2", "8 3 2 3"),
        LinkState::Up => ("#2e7d32", "1.5", "none"),
    }
}

pub(super) fn render(graph: &Graph) -> String {
    let layout = Layout::new(graph);
    let (width, height) = (layout.width, layout.height);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <style>{STYLE}</style>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let is_crowd = |link: &&Link| link.state > LinkState::Partly && !is_with_hub(graph, link);
    let crowd = graph.links.iter().filter(is_crowd).count();
    let hidden = if crowd > MAX_OTHER_LINKS { crowd } else { 0 };
    write_header(&mut svg, graph, hidden);
    // The links in the worst state are drawn last, so that they are on top.
    let mut links: Vec<&Link> = graph
        .links
        .iter()
        .filter(|link| hidden == 0 || !is_crowd(link))
        .collect();
    links.sort_by_key(|link| std::cmp::Reverse(link.state));
    let mut labels = String::new();
    for link in links {
        write_link(&mut svg, &mut labels, graph, &layout, link);
    }
    for (member, place) in graph.members.iter().zip(&layout.places) {
        let class = match (member.is_reachable, member.is_quarantined) {
            (false, _) => "bad",
            (true, true) => "closed",
            (true, false) => "box",
        };
        let (x, y) = (place.x, place.y);
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"5\"/>",
            place.width, place.height
        );
        // The text of the hub is in the middle of its tall box.
        write_member(&mut svg, graph, member, (x + 10, y + (place.height - BOX_HEIGHT) / 2));
    }
    svg + &labels + "</svg>\n"
}

fn write_member(svg: &mut String, graph: &Graph, member: &Member, (x, y): (usize, usize)) {
    let name = shorten(&member.name, 26);
    let name = if member.is_hub { format!("{name} (hub)") } else { name };
    let state = match (describe_unreachable(graph, member), member.is_quarantined) {
        (Some(unreachable), _) => unreachable,
        (None, true) => format!("{}, quarantined", member.describe_nodes()),
        (None, false) => member.describe_nodes(),
    };
    write_text(svg, "name", (x, y + 19), &name);
    write_text(svg, "small", (x, y + 36), &state);
}

fn write_header(svg: &mut String, graph: &Graph, hidden: usize) {
    let mut title = summary(graph);
    if hidden > 0 {
        let _ = write!(
            title,
            " ({hidden} links that are neither down nor partly up are not drawn)"
        );
    }
    write_text(svg, "name", (24, 28), &title);
    let time = graph.time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
    write_text(svg, "small", (24, 46), &time);
    let mut x = 24;
    for state in LinkState::ALL.into_iter().rev() {
        let _ = writeln!(svg, "<path d=\"M{x} {y}h34\"{}/>", stroke(state), y = HEADER - 20);
        write_text(svg, "small", (x + 42, HEADER - 16), state.word());
        x += 120;
    }
}

fn write_link(svg: &mut String, labels: &mut String, graph: &Graph, layout: &Layout, link: &Link) {
    let (path, middle) = layout.path(link);
    let [a, b] = [link.ends.0, link.ends.1].map(|at| escape(&graph.members[at].name));
    let detail = match link.detail.is_empty() {
        true => String::new(),
        false => format!(": {}", escape(&link.detail)),
    };
    // Browsers show the title of an element under the mouse pointer.
    let title = format!("{a} - {b}: {}{detail}", link.state.word());
    let _ = writeln!(
        svg,
        "<path d=\"{path}\"{}><title>{title}</title></path>",
        stroke(link.state)
    );
    if let (LinkState::Down | LinkState::Partly, Some((x, y))) = (link.state, middle) {
        let text = escape(&shorten(&link.detail, 34));
        let _ = writeln!(
            labels,
            "<text class=\"small\" text-anchor=\"middle\" x=\"{x}\" y=\"{}\">{text}</text>",
            y - 6
        );
    }
}

fn stroke(state: LinkState) -> String {
    let (color, width, dashes) = line(state);
    format!(" stroke=\"{color}\" stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\"")
}

fn write_text(svg: &mut String, class: &str, (x, y): (usize, usize), text: &str) {
    let _ = writeln!(
        svg,
        "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>",
        escape(text)
    );
}

/// Cuts text that would not fit into a box.
fn shorten(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let kept: String = text.chars().take(most - 3).collect();
    kept + "..."
}

/// Escapes text for XML. Names and messages come from clusters.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}

//! Places the members of a graph: the hub as one tall box in the middle, the others in a column on each side of it. So each link with the
//! hub is a short horizontal line, which stays legible with many members.

use super::model::{Graph, Link};

pub(super) const BOX_WIDTH: usize = 230;
pub(super) const BOX_HEIGHT: usize = 46;
/// From one box of a column to the next.
const PITCH: usize = 58;
/// Between a column and the hub.
const GAP: usize = 200;
const HUB_WIDTH: usize = 200;
/// The space above the boxes, for the title and the legend.
pub(super) const HEADER: usize = 84;
const MARGIN: usize = 24;
/// The additional space beside a column for links between its members.
const ARCS: usize = 130;

/// Where a member is drawn, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) width: usize,
    pub(super) height: usize,
    column: Column,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Left,
    Hub,
    Right,
}

/// The places of all members.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) width: usize,
    pub(super) height: usize,
    /// By position in [`Graph::members`].
    pub(super) places: Vec<Place>,
}

impl Layout {
    pub(super) fn new(graph: &Graph) -> Self {
        let hubs = graph.members.iter().filter(|member| member.is_hub).count();
        let rows = (graph.members.len() - hubs).div_ceil(2).max(1);
        let height = rows * PITCH - (PITCH - BOX_HEIGHT);
        // The hub comes first, and the next `rows` members form the left column.
        let is_left = |at: usize| at < hubs + rows;
        let is_in_column = |link: &Link| !is_with_hub(graph, link) && is_left(link.ends.0) == is_left(link.ends.1);
        let arcs = if graph.links.iter().any(is_in_column) { ARCS } else { 0 };
        let left = MARGIN + arcs;
        let hub = left + BOX_WIDTH + GAP;
        let right = if hubs == 0 { hub } else { hub + HUB_WIDTH + GAP };
        let mut others = 0..;
        let places = graph.members.iter().map(|member| {
            if member.is_hub {
                return Place {
                    x: hub,
                    y: HEADER,
                    width: HUB_WIDTH,
                    height,
                    column: Column::Hub,
                };
            }
            let index = others.next().unwrap_or(0);
            let (x, row, column) = match index < rows {
                true => (left, index, Column::Left),
                false => (right, index - rows, Column::Right),
            };
            Place {
                x,
                y: HEADER + row * PITCH,
                width: BOX_WIDTH,
                height: BOX_HEIGHT,
                column,
            }
        });
        Self {
            places: places.collect(),
            width: right + BOX_WIDTH + arcs + MARGIN,
            height: HEADER + height + MARGIN,
        }
    }

    /// Returns the path of a link in SVG's syntax, and the middle of its line if it has space for a label.
    pub(super) fn path(&self, link: &Link) -> (String, Option<(usize, usize)>) {
        let (a, b) = (self.places[link.ends.0], self.places[link.ends.1]);
        // Links between the two columns pass behind the hub, so they start lower in a member's box than links with the hub.
        let (hub_line, other_line) = (BOX_HEIGHT / 3, BOX_HEIGHT * 3 / 4);
        // The two edges that face each other.
        let (left, right) = if a.x <= b.x { (a, b) } else { (b, a) };
        let (from, to) = (left.x + left.width, right.x);
        match (left.column, right.column) {
            (Column::Hub, _) | (_, Column::Hub) => {
                let y = if left.column == Column::Hub { right.y } else { left.y } + hub_line;
                (format!("M{from} {y}H{to}"), Some((usize::midpoint(from, to), y)))
            }
            (one, other) if one == other => {
                let (y1, y2) = (a.y + other_line, b.y + other_line);
                let bulge = (30 + y1.abs_diff(y2) / 6).min(ARCS);
                let (edge, control) = match one {
                    Column::Left => (a.x, a.x - bulge),
                    _ => (a.x + a.width, a.x + a.width + bulge),
                };
                (format!("M{edge} {y1}C{control} {y1} {control} {y2} {edge} {y2}"), None)
            }
            _ => {
                let (y1, y2) = (left.y + other_line, right.y + other_line);
                let bend = (to - from) / 2;
                (
                    format!("M{from} {y1}C{} {y1} {} {y2} {to} {y2}", from + bend, to - bend),
                    None,
                )
            }
        }
    }
}

/// Whether one end of a link is the hub.
pub(super) fn is_with_hub(graph: &Graph, link: &Link) -> bool {
    graph.members[link.ends.0].is_hub || graph.members[link.ends.1].is_hub
}

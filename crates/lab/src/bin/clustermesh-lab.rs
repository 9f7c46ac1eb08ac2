//! The lab's own program: supervisor, first process of each node, and `list`/`down` for people.
fn main() -> anyhow::Result<()> {
    clustermesh_lab::stages::main()
}

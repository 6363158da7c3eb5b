package command

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// wideEdge and narrowEdge are the columns of an edge of a tree, with its advantage and without.
const wideEdge, narrowEdge = 10, 3

// drawTree draws the tree of a group in that many columns with one line per leaf: where the paths part, the advantage
// of each segment after the branch point, and the leaf with its reward and advantage. adv is nil while the group is
// open.
func drawTree(tree *schemas.Tree, adv *schemas.Advantage, columns int) []string {
	if adv == nil {
		adv = &schemas.Advantage{}
	}
	segments := map[schemas.TreeSegment]*float64{}
	for _, b := range adv.Branches {
		for _, c := range b.Children {
			segments[schemas.TreeSegment{SampleIndex: c.SampleIndex, Begin: b.StepIndex}] = c.Advantage
		}
	}
	const start, label = 3, 36
	edge := wideEdge
	if start+edge*len(tree.Branches)+label > columns {
		edge = narrowEdge
	}
	head := strings.Repeat(" ", start)
	for i, b := range tree.Branches {
		text := fmt.Sprint(b.StepIndex)
		if edge == wideEdge && i == 0 {
			text += " step"
		}
		head += fmt.Sprintf("%-*s", edge, text)
	}
	lines := []string{strings.TrimRight(head, " ")}
	for leaf := range tree.Leaves() {
		line := strings.Repeat(" ", start)
		if leaf == 0 {
			line = strings.Repeat("─", start)
		}
		for depth, b := range tree.Branches {
			behind := tree.LeavesBelow(depth + 1)
			child := leaf / behind % b.Width
			begins, last := leaf%behind == 0, child == b.Width-1
			mark, rest := " ", " "
			switch {
			case begins && child == 0:
				mark, rest = "┬", "─"
			case begins && last:
				mark, rest = "└", "─"
			case begins:
				mark, rest = "├", "─"
			case !last:
				mark = "│"
			}
			text := ""
			if a := segments[schemas.TreeSegment{SampleIndex: leaf, Begin: b.StepIndex}]; begins && a != nil &&
				edge == wideEdge {
				text = fmt.Sprintf(" %+.2f ", *a)
			}
			line += mark + text + strings.Repeat(rest, max(0, edge-1-utf8.RuneCountInString(text)))
		}
		line += fmt.Sprintf(" #%d", leaf)
		if leaf < int64(len(adv.Members)) {
			m := &adv.Members[leaf]
			if m.Status == schemas.StatusScored {
				line += fmt.Sprintf("  %s  %s", results.Number(m.Reward, "%.3f"), results.Number(m.Advantage, "%+.3f"))
			} else {
				line += "  " + m.Status
			}
		}
		lines = append(lines, line)
	}
	return lines
}

package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/results"
)

// Size of a chart in its own units, which the page stretches to its width.
const (
	chartWidth, chartHeight = 1000, 100
	maxPoints               = 250 // beyond it neighbours are averaged
	maxDots                 = 60  // beyond it the line alone is drawn
)

// chart is the mean reward over the groups, in the order in which they closed.
type chart struct {
	Line, Dots string // paths of SVG
	Low, High  string
	// Says is the chart in words, Each how many groups a point stands for, where it is more than one.
	Says string
	Each int
}

// newChart returns the chart of groups with a mean; nil where there are fewer than two.
func newChart(groups []*results.Group) *chart {
	var means []float64
	for _, g := range slices.Backward(newestFirst(groups)) {
		if g.Mean != nil {
			means = append(means, *g.Mean)
		}
	}
	if len(means) < 2 {
		return nil
	}
	c := &chart{Each: (len(means) + maxPoints - 1) / maxPoints}
	var points []float64
	for some := range slices.Chunk(means, c.Each) {
		points = append(points, mean(some))
	}
	low, high := slices.Min(points), slices.Max(points)
	c.Low, c.High = fmt.Sprintf("%.4g", low), fmt.Sprintf("%.4g", high)
	c.Says = fmt.Sprintf("mean reward of %d groups in the order in which they closed: ", len(means)) +
		fmt.Sprintf("first %.4g, last %.4g, between %.4g and %.4g", means[0], means[len(means)-1], low, high)
	var line, dots strings.Builder
	for i, v := range points {
		x, y := chartWidth/2.0, chartHeight/2.0
		if len(points) > 1 {
			x = chartWidth * float64(i) / float64(len(points)-1)
		}
		if high > low {
			y = chartHeight * (high - v) / (high - low)
		}
		step := "L"
		if i == 0 {
			step = "M"
		}
		fmt.Fprintf(&line, "%s%.1f %.1f", step, x, y)
		if len(points) <= maxDots {
			fmt.Fprintf(&dots, "M%.1f %.1fh0.01", x, y)
		}
	}
	c.Line, c.Dots = line.String(), dots.String()
	return c
}

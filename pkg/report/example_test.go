package report_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/report"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// A run of which nothing but a refusal is known; results.Read gives one of what is stored.
func ExampleWrite() {
	refused := view.GroupResult{UID: "p", Prompt: "a <red> fox", Status: schemas.StatusRefused, Error: "no such model"}
	run := &results.Run{Summary: results.Summary{Run: "night"}, Groups: []*results.Group{{GroupResult: refused}}}
	var page bytes.Buffer
	contents, err := report.Write(context.Background(), &page, nil, run, report.Options{Made: time.Now()})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(contents.Groups, strings.Contains(page.String(), "<h3>a &lt;red&gt; fox</h3>"))
	// Output: 1 true
}

package tracing_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/tracing"
)

const (
	ids    = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
	parent = "00-" + ids + "-01"
)

// What breaks the standard is not handed on, and the error says what; the rest is, with its flags.
func TestOf(t *testing.T) {
	t.Parallel()
	members := strings.Repeat("a=1,", 40)
	for _, of := range []struct {
		parent, state string
		want          tracing.Context
		says          string
	}{
		{"", "", tracing.Context{}, ""},
		{parent, "", tracing.Context{Parent: parent}, ""},
		{"00-" + ids + "-00", "", tracing.Context{Parent: "00-" + ids + "-00"}, ""},
		{"00-" + ids + "-ff", "", tracing.Context{Parent: "00-" + ids + "-ff"}, ""},
		{"01-" + ids + "-01-more", "", tracing.Context{Parent: "01-" + ids + "-01-more"}, ""},
		{parent, "congo=t61, rojo=00f-@ x!,,\tt@v=y ", tracing.Context{Parent: parent, State: "congo=t61,rojo=00f-@ x!,t@v=y"}, ""},
		{parent, members, tracing.Context{Parent: parent, State: members[:32*4-1]}, ""},
		{parent, "a=" + strings.Repeat("x", 250) + ",b=" + strings.Repeat("y", 250) + ",c=3,d=" + strings.Repeat("z", 20), tracing.Context{
			Parent: parent, State: "a=" + strings.Repeat("x", 250) + ",b=" + strings.Repeat("y", 250) + ",c=3",
		}, ""},
		{"", "a=1", tracing.Context{}, "belongs to no traceparent"},
		{parent, "A=1", tracing.Context{Parent: parent}, `tracestate: "A=1"; must be KEY=VALUE`},
		{parent, "a=1,b", tracing.Context{Parent: parent}, `"b"; must be`},
		{parent, "a=1=2", tracing.Context{Parent: parent}, "must be KEY=VALUE"},
		{parent, strings.Repeat("a", 256) + "=1", tracing.Context{Parent: parent, State: strings.Repeat("a", 256) + "=1"}, ""},
		{parent, strings.Repeat("a", 257) + "=1", tracing.Context{Parent: parent}, "must be KEY=VALUE"},
		{parent, "a=" + strings.Repeat("1", 257), tracing.Context{Parent: parent}, "must be KEY=VALUE"},
		{parent, "a=\x01", tracing.Context{Parent: parent}, "must be KEY=VALUE"},
	} {
		headers := map[string][]string{}
		if of.parent != "" {
			headers["traceparent"] = []string{of.parent}
		}
		if of.state != "" {
			headers["Tracestate"] = []string{of.state}
		}
		got, err := tracing.Of(headers)
		if got != of.want || (err == nil) != (of.says == "") || err != nil && !strings.Contains(err.Error(), of.says) {
			t.Errorf("%v: got %+v, %v; want %+v, %q", headers, got, err, of.want, of.says)
		}
	}
	for _, bad := range []string{
		"x", "00-" + ids, strings.ToUpper(parent), parent + "-", parent + "0", parent + "-more", "ff-" + ids + "-01", "0-" + ids + "-01",
		"00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01", "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
		"01-" + ids + "-01more", "01-" + ids + "-01-" + strings.Repeat("x", 600), parent + "," + parent, " " + parent, parent + "\n",
	} {
		got, err := tracing.Of(map[string][]string{"traceparent": {bad}, "tracestate": {"a=1"}, "baggage": {"k=v"}})
		if got != (tracing.Context{Baggage: "k=v"}) || err == nil ||
			!strings.Contains(err.Error(), "must be 00-TRACE-PARENT-FLAGS") {
			t.Errorf("%.80q: got %+v, %v", bad, got, err)
		}
	}
	if got, err := tracing.Of(map[string][]string{"traceparent": {parent, parent}}); got != (tracing.Context{}) ||
		err == nil {
		t.Errorf("two parents: %+v, %v", got, err)
	}
}

// A header gets what it lacks; the state goes with its parent.
func TestAdd(t *testing.T) {
	t.Parallel()
	ctx := tracing.With(t.Context(), tracing.Context{Parent: parent, State: "a=1", Baggage: "k=v"})
	other := strings.Replace(parent, "4b", "5b", 1)
	for _, of := range []struct{ have, want map[string][]string }{
		{map[string][]string{}, map[string][]string{"traceparent": {parent}, "tracestate": {"a=1"}, "baggage": {"k=v"}}},
		{map[string][]string{"Traceparent": {other}}, map[string][]string{"Traceparent": {other}, "baggage": {"k=v"}}},
		{map[string][]string{"baggage": {"x=y"}}, map[string][]string{"traceparent": {parent}, "tracestate": {"a=1"}, "baggage": {"x=y"}}},
	} {
		tracing.Add(ctx, of.have)
		if !maps.EqualFunc(of.have, of.want, slices.Equal) {
			t.Errorf("got %v, want %v", of.have, of.want)
		}
	}
	if h := tracing.Header(t.Context()); h != nil {
		t.Errorf("without a context: %v", h)
	}
}

package integration_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/schemas"
)

// attempt is something to try with the credentials of every role, and who may do it by the table of the document.
type attempt struct {
	what string
	do   func(nc *nats.Conn) error
	may  func(auth.Grant) bool
	// alone says that only the admin may. Of all else some other role must be able to: a stream, bucket, durable or
	// subject that is in no role's row has been forgotten.
	alone bool
}

// subjectsOf has a subject of each function of package schemas that names one; reading the source says whether one is
// missing.
var subjectsOf = map[string]string{
	"PromptSubject": schemas.PromptSubject("r"), "GroupSubject": schemas.GroupSubject("r", "u"),
	"OpeningSubject": schemas.OpeningSubject("r", "b", "u"), "PlanSubject": schemas.PlanSubject("r", "u"),
	"RequestSubject": schemas.RequestSubject("r", "l", "u", 0, schemas.StageMain), "StepSubject": schemas.StepSubject("r", "u", 0, schemas.StageMain, "t", 0),
	"TokensSubject":     schemas.TokensSubject("r", "u", 0, schemas.StageMain, "t", 0),
	"PartSubject":       schemas.PartSubject(schemas.StepSubject("r", "u", 0, schemas.StageMain, "t", 0), 1),
	"TrajectorySubject": schemas.TrajectorySubject("r", "u", 0, schemas.StageMain), "RewardSubject": schemas.RewardSubject("r", "b", "u", 0),
	"VerdictSubject": schemas.VerdictSubject("r", "u", 0, "n"), "ScoreSubject": schemas.ScoreSubject("n"),
	"InteractSubject": schemas.InteractSubject("n"), "TeacherSubject": schemas.TeacherSubject("n"),
	"AdvantageSubject": schemas.AdvantageSubject("r", "u"), "BatchSubject": schemas.BatchSubject("r", "b"),
	"PolicySubject": schemas.PolicySubject("l", schemas.TenantMain), "AppliedSubject": schemas.AppliedSubject("l", schemas.TenantMain, "i"),
	"DeadSubject": schemas.DeadSubject("s", "r", "u"), "ControlSubject": schemas.ControlSubject("r"),
	"ParkedSubject":   schemas.ParkedSubject("r", "l", "u", 0, schemas.StageMain),
	"BucketSubject":   schemas.BucketSubject(schemas.LeaseBucket, "l"), // those of all buckets are made of their streams
	"PresenceSubject": schemas.PresenceSubject("i"), "DrySubject": schemas.DrySubject("r"),
	"UpdateSubject": schemas.UpdateSubject("r", "l", schemas.TenantMain, "t", 1),
	"SeenSubject":   schemas.SeenSubject("l"), "RatingSubject": schemas.RatingSubject("r", "u", 0),
	"StepScoreSubject": schemas.StepScoreSubject(), "StepRewardSubject": schemas.StepRewardSubject("r", "u", 0, 1),
	"SelectionSubject": schemas.SelectionSubject("r", "u", 1),
}

// durablesOf has a durable of each function of package schemas that describes one.
var durablesOf = map[string]schemas.Durable{
	"PromptsDurable": schemas.PromptsDurable(), "ControlDurable": schemas.ControlDurable(),
	"AdvisoriesDurable": schemas.AdvisoriesDurable(), "RequestsDurable": schemas.RequestsDurable("none"),
	"TrajectoriesDurable": schemas.TrajectoriesDurable(), "VerdictsDurable": schemas.VerdictsDurable(),
	"RewardsDurable": schemas.RewardsDurable(3),
}

// attempts are all that can be tried, made from the code. The bodies of requests that could change something are no
// JSON, so that nothing is changed where they are allowed.
func attempts() (out []attempt) {
	has := func(list func(auth.Grant) []string, name string) func(auth.Grant) bool {
		return func(g auth.Grant) bool { return slices.Contains(list(g), name) }
	}
	reads := func(g auth.Grant) []string { return g.Reads }
	try := func(what, subject string, may func(auth.Grant) bool) {
		out = append(out, attempt{what: what, do: sends(subject, "{"), may: may})
	}
	for name, subject := range subjectsOf {
		if strings.HasPrefix(subject, "$KV.") {
			continue
		}
		kind, _, hasTokens := strings.Cut(strings.TrimPrefix(subject, schemas.Prefix), ".")
		if _, stored := schemas.StreamOf(subject); stored {
			try("publish "+subject, subject, has(func(g auth.Grant) []string { return g.Publishes }, kind))
			out[len(out)-1].alone = name == "ControlSubject"
			out = append(out, attempt{what: "listen to " + subject, do: listens(subject, ""), alone: true})
			continue
		}
		filter := schemas.Prefix + kind
		if hasTokens {
			filter += ".*"
		}
		try("ask "+subject, subject, has(func(g auth.Grant) []string { return g.Asks }, filter))
		out = append(out, attempt{
			what: "answer " + subject, do: listens(subject, "n"),
			may: has(func(g auth.Grant) []string { return g.Answers }, filter),
		}, attempt{what: "overhear " + subject, do: listens(subject, ""), alone: true})
	}
	for _, stream := range schemas.StreamNames() {
		spec, _ := schemas.StreamNamed(stream)
		follows := func(g auth.Grant) bool {
			if spec.WorkQueue {
				return slices.Contains(g.WorksOn(), stream)
			}
			return slices.Contains(g.Reads, stream) || slices.Contains(g.WorksOn(), stream)
		}
		try("read "+stream, "$JS.API.DIRECT.GET."+stream, has(reads, stream))
		try("read of the leader of "+stream, "$JS.API.STREAM.MSG.GET."+stream, has(reads, stream))
		try("make a consumer of "+stream, "$JS.API.CONSUMER.CREATE."+stream+".none.>", follows)
		try("delete a consumer of "+stream, "$JS.API.CONSUMER.DELETE."+stream+".none", follows)
		try("read with a consumer of "+stream, "$JS.API.CONSUMER.MSG.NEXT."+stream+".none", follows)
		for verb, list := range map[string]func(auth.Grant) []string{
			"MSG.DELETE": func(g auth.Grant) []string { return g.Deletes },
			"PURGE":      func(g auth.Grant) []string { return g.Purges },
			"UPDATE":     nil, "DELETE": nil, "CREATE": nil, "RESTORE": nil, "SNAPSHOT": nil, "LEADER.STEPDOWN": nil,
		} {
			may := func(auth.Grant) bool { return false }
			if list != nil {
				may = has(list, stream)
			}
			out = append(out, attempt{
				what: verb + " " + stream, do: sends("$JS.API.STREAM."+verb+"."+stream, "{"), may: may, alone: true,
			})
		}
		writes := func(bucket string) func(auth.Grant) bool {
			return has(func(g auth.Grant) []string { return g.Writes }, bucket)
		}
		if bucket, ok := strings.CutPrefix(stream, "KV_"); ok {
			try("write to "+bucket, schemas.BucketSubject(bucket, "none"), writes(bucket))
		} else if bucket, ok := strings.CutPrefix(stream, "OBJ_"); ok {
			try("write to "+bucket, "$O."+bucket+".M.none", writes(bucket))
		}
	}
	sees := func(g auth.Grant) bool { return g.SeesServices }
	try("find the services", "$SRV.INFO", sees)
	try("ask the clocks of services", auth.ClockSubject, sees)
	for subject, service := range map[string]string{
		"$SRV.PING": "meander-scorer", "$SRV.PING.meander-scorer": "meander-scorer", "$SRV.PING.meander-intake": "", auth.ClockSubject: "",
	} {
		may := func(g auth.Grant) bool { return g.Discoverable || slices.Contains(g.FoundAs, service) }
		out = append(out, attempt{what: "answer " + subject, do: listens(subject, ""), may: may})
	}
	return out
}

// durableAttempts are what can be tried at the durables of services.
func durableAttempts() (out []attempt) {
	for _, d := range durablesOf {
		at := d.Stream + "." + d.Name
		owns := func(g auth.Grant) bool { return string(g.Role) == d.Service }
		for _, verb := range []string{"CREATE.%s", "CREATE.%s.mdr.v1.none", "MSG.NEXT.%s", "DELETE.%s", "UNPIN.%s"} {
			subject := "$JS.API.CONSUMER." + fmt.Sprintf(verb, at)
			out = append(out, attempt{what: "ask " + subject, do: sends(subject, "{"), may: owns})
		}
		acks := func(g auth.Grant) bool { return owns(g) || slices.Contains(g.Acknowledges, d.Stream) }
		out = append(out, attempt{what: "acknowledge " + at, do: sends("$JS.ACK."+at+".1.1.1.1.0", "{"), may: acks})
	}
	return out
}

// Every stream, bucket, durable and subject that the code has, tried with the credentials of every role: the server
// does what the table of the document says, and what is in no row of it has been forgotten.
func TestRoles_Everything(t *testing.T) {
	t.Parallel()
	g := servers()["nats-server"](t)
	all := append(attempts(), durableAttempts()...)
	allowed := map[string]bool{}
	for _, grant := range auth.Grants() {
		u := g.user(t, string(grant.Role))
		for _, a := range all {
			if grant.Unlimited {
				if verb, _, _ := strings.Cut(a.what, " "); verb != "DELETE" && verb != "CREATE" && u.refused(t, a.do) {
					t.Errorf("%s may not %s, and must", grant.Role, a.what)
				}
				continue
			}
			may := a.may != nil && a.may(grant)
			allowed[a.what] = allowed[a.what] || may
			if refused := u.refused(t, a.do); refused == may {
				t.Errorf("%s, %s: refused %v; by the table of roles it may: %v", grant.Role, a.what, refused, may)
			}
		}
	}
	for _, a := range all {
		if !a.alone && !allowed[a.what] {
			t.Errorf("%s: no role may; it needs a place in a grant", a.what)
		}
	}
	names := regexp.MustCompile(`["'](?:KV_|OBJ_)?(mdr-[a-z]+|MDR_[A-Z]+)["']`)
	eachSource(t, func(file string, text []byte) {
		for _, m := range names.FindAllSubmatch(text, -1) {
			known := func(stream string) bool {
				return strings.TrimPrefix(strings.TrimPrefix(stream, "KV_"), "OBJ_") == string(m[1])
			}
			// of Setup, for a moment
			if !slices.ContainsFunc(schemas.StreamNames(), known) && string(m[1]) != "MDR_ROOM" {
				t.Errorf("%s names %s, which is not in schemas.StreamNames, so no role is tried with it", file, m[1])
			}
		}
	}, "pkg", "services", "schemas")
	for name := range schemasFunctions(t, "Subject") {
		if subjectsOf[name] == "" {
			t.Errorf("schemas.%s names a subject that no role is tried with: add it to subjectsOf", name)
		}
	}
	for name := range schemasFunctions(t, "Durable") {
		if durablesOf[name].Name == "" {
			t.Errorf("schemas.%s describes a durable that no role is tried with: add it to durablesOf", name)
		}
	}
}

// schemasFunctions returns the exported functions of package schemas whose names end so, but those that read a
// subject.
func schemasFunctions(t *testing.T, suffix string) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	files, err := filepath.Glob(filepath.Join(root, "schemas/*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(err, files)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range f.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if ok && fn.Recv == nil && fn.Name.IsExported() && strings.HasSuffix(fn.Name.Name, suffix) &&
				!slices.Contains([]string{"ParseSubject", "StoredSubject", "PublishedSubject"}, fn.Name.Name) {
				out[fn.Name.Name] = true
			}
		}
	}
	return out
}

// eachSource calls each with the files in Go and Python of the product in some folders.
func eachSource(t *testing.T, each func(file string, text []byte), dirs ...string) {
	t.Helper()
	apart := []string{"tests", "remotetest", "node_modules", "learn"}
	for _, dir := range dirs {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && slices.Contains(apart, d.Name()):
				return fs.SkipDir
			case d.IsDir(), strings.HasSuffix(path, "_test.go"),
				!slices.Contains([]string{".go", ".py"}, filepath.Ext(path)):
				return nil
			}
			text, err := os.ReadFile(path)
			if err == nil {
				name, _ := filepath.Rel(root, path)
				each(filepath.ToSlash(name), text)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// listening has each file of the product that listens, and the row of the document about it: where, who may use it,
// and what it tells.
var listening = map[string]string{
	"pkg/natsd/natsd.go": "`up --listen`, 127.0.0.1:4222 | NATS | users of the folder of `--auth`, or the token; " +
		"without both every user of the machine | what the role may",
	"services/ui/ui.go": "`ui --listen`, `up --ui-listen`, 127.0.0.1:4280 | the page | as `ui` says | prompts, samples, " +
		"settings of runs",
	"services/internal/boot/health.go": "`--health-addr`, `--metrics-addr`, none or 127.0.0.1:808x | `/metrics`, " +
		"`/healthz`, `/readyz` | everybody who reaches it | counters with names of lanes, streams, reward functions and " +
		"consumers; faults in words; no prompt, sample, run or key",
	"pkg/auth/serverconfig.go": "`http` of `auth/nats.conf`, 127.0.0.1:8222 | monitoring of a NATS server of its own | " +
		"every user of the machine | its connections, streams and subjects in numbers and names",
	"pkg/client/python/meander/torch/__main__.py": "`python -m meander.torch --socket` or `--listen`, none | a worker | " +
		"its user alone, by the rights of the socket; on TCP who has its token or certificate | the network of a model",
	"deploy/scorers/http_server.py": "`http_server.py --host`, 127.0.0.1:8900 | an example of a reward function | " +
		"everybody who reaches it | scores of the images that it is sent",
}

// The document lists every address that the product listens on: a new one needs a row, which says who may use it.
func TestRoles_Addresses(t *testing.T) {
	t.Parallel()
	listens := regexp.MustCompile(`net\.Listen\(|ListenConfig\{|ListenAndServe|HTTPServer\(|socket\.create_server\(|` +
		`listener\.listen\(|start_unix_server\(|start_server\(|(?m)^http: "`)
	found := map[string]bool{}
	eachSource(t, func(file string, text []byte) {
		if listens.Match(text) {
			found[file] = true
		}
	}, "pkg", "services", "deploy")
	if want := slices.Sorted(maps.Keys(listening)); !slices.Equal(slices.Sorted(maps.Keys(found)), want) {
		t.Errorf("listening: %v; the table has %v", slices.Sorted(maps.Keys(found)), want)
	}
	var table strings.Builder
	table.WriteString("| address | what | who may | what it tells |\n|---|---|---|---|\n")
	for _, file := range slices.Sorted(maps.Keys(listening)) {
		fmt.Fprintf(&table, "| %s |\n", listening[file])
	}
	inDocument(t, "deploy/guide/appendix.md", "addresses", table.String())
}

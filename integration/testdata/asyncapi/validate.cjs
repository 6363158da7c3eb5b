// Reads an AsyncAPI document by the official parser, and says what is wrong with it.
const fs = require('fs');
const { Parser } = require('@asyncapi/parser');

const source = process.argv[2];
new Parser().parse(fs.readFileSync(source, 'utf8'), { source }).then(({ document, diagnostics }) => {
  const wrong = diagnostics.filter((d) => d.severity <= 1); // errors and warnings; the rest is advice
  for (const d of wrong) console.error(`${d.path.join('.')}: ${d.message}`);
  if (wrong.length || !document) process.exit(1);
  const count = (name) => `${document[name]().length} ${name}`;
  console.log(['channels', 'operations', 'servers'].map(count).join(', '));
});
